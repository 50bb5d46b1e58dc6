"""A Hugging Face hub of our own on 127.0.0.1: real HTTP, as much of the API as fetching a model needs.

Every request is noted, so that tests can say what was asked for and, above all, what was not.
"""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


class MockHub:
    """`repos`: id to {revision: {file name: bytes}}; `gated`: ids whose files are refused. A context manager."""

    def __init__(self, repos: dict[str, dict[str, dict[str, bytes]]], gated: tuple[str, ...] = ()):
        self.repos = repos
        self.gated = gated
        self.requests: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub._answer(self)

            do_HEAD = do_GET

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> MockHub:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def fetched(self) -> set[str]:
        """Names of files whose content was asked for."""
        return {path.rsplit("/", 1)[-1] for method, path in map(str.split, self.requests) if "/resolve/" in path}

    def revision_id(self, repo: str, revision: str) -> str:
        return hashlib.sha1(f"{repo}@{revision}".encode()).hexdigest()

    def _files(self, repo: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        for name, files in self.repos.get(repo, {}).items():
            if revision in (name, self.revision_id(repo, name)):
                return self.revision_id(repo, name), files
        return None

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        path = unquote(urlsplit(request.path).path)
        self.requests.append(f"{request.command} {path.replace(' ', '_')}")
        if path.startswith("/api/models/"):
            self._api(request, path.removeprefix("/api/models/"))
            return
        repo, _, rest = path.lstrip("/").partition("/resolve/")
        revision, _, name = rest.partition("/")
        if repo in self.gated:
            self._send(request, 403, b"", {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted"})
            return
        found = self._files(repo, revision)
        if found is None or name not in found[1]:
            self._send(request, 404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        content = found[1][name]
        etag = hashlib.sha1(content).hexdigest()
        self._send(request, 200, content, {"ETag": f'"{etag}"', "X-Repo-Commit": found[0]})

    def _api(self, request: BaseHTTPRequestHandler, rest: str) -> None:
        for marker in ("/revision/", "/tree/"):
            repo, found, revision = rest.partition(marker)
            if found:
                break
        else:
            repo, revision, marker = rest, "main", "/revision/"
        if repo not in self.repos:
            self._send(request, 401, b'{"error": "Invalid username or password."}', {"X-Error-Code": "RepoNotFound"})
            return
        files = self._files(repo, revision)
        if files is None:
            self._send(request, 404, b"", {"X-Error-Code": "RevisionNotFound"})
            return
        if marker == "/tree/":
            body: object = [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for name, content in files[1].items()
            ]
        else:
            body = {"id": repo, "sha": files[0], "siblings": [{"rfilename": name} for name in files[1]]}
        self._send(request, 200, json.dumps(body).encode(), {"Content-Type": "application/json"})

    @staticmethod
    def _send(request: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str]) -> None:
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name, value)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        if request.command == "GET":
            request.wfile.write(body)
