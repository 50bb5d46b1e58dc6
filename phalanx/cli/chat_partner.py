"""Who `phalanx chat` talks to: an engine of its own, or a running server. One small interface, two kinds.

Both give an answer piece by piece to a caller that blocks, and stop computing it when the caller leaves early.
"""

from __future__ import annotations

import http.client
import json
import queue
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from phalanx.config import EngineConfig
from phalanx.errors import PhalanxError, UserError
from phalanx.executor.base import StartProgress

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Piece:
    text: str = ""
    tokens: int = 0
    """Tokens counted with this piece."""
    finish_reason: str | None = None


class Partner(Protocol):
    name: str
    """The model's."""

    def answer(self, messages: Messages, options: dict[str, Any]) -> Iterator[Piece]:
        """`options` are `SamplingParams` fields. Closing the iterator ends the answer. Raises PhalanxError."""
        ...

    def close(self) -> None: ...


class LocalPartner:
    """An engine on an event loop of its own, which goes on turning while the user types."""

    def __init__(self, config: EngineConfig, progress: StartProgress | None = None):
        """Loads the model. Raises UserError."""
        from phalanx.engine.async_engine import AsyncEngine
        from phalanx.engine.loop_thread import LoopThread

        self._thread = LoopThread("phalanx-chat")
        self._engine = AsyncEngine(config)
        try:
            self.name = self._thread.call(self._engine.start(progress)).model
            if self._engine.chat_template is None:
                raise UserError(
                    f"{self.name} has no chat template, so it cannot chat.",
                    fix="Choose an instruct model, give --chat-template, or use 'phalanx generate'.",
                )
        except BaseException:
            self.close()
            raise

    def answer(self, messages: Messages, options: dict[str, Any]) -> Iterator[Piece]:
        pieces: queue.SimpleQueue[Piece | BaseException | None] = queue.SimpleQueue()
        feeding = self._thread.begin(self._feed(messages, options, pieces))
        try:
            while (piece := pieces.get()) is not None:
                if isinstance(piece, BaseException):
                    raise piece
                yield piece
        finally:
            feeding.cancel()

    async def _feed(
        self, messages: Messages, options: dict[str, Any], pieces: queue.SimpleQueue[Piece | BaseException | None]
    ) -> None:
        try:
            params = self._engine.default_sampling(**{"max_tokens": None, **options})
            prompt = await self._engine.apply_chat_template(messages)
            stream = await self._engine.submit(prompt, params, add_special_tokens=False, source="messages")
            try:
                async for delta in stream:
                    output = delta.outputs[0]
                    pieces.put(Piece(output.text, len(output.token_ids), output.finish_reason))
            finally:
                await stream.aclose()
            pieces.put(None)
        except Exception as error:  # goes to the thread that waits
            pieces.put(error)

    def close(self) -> None:
        try:
            self._thread.call(self._engine.close())
        finally:
            self._thread.end(5.0)


class RemotePartner:
    """A running server, Phalanx or another with the OpenAI API, over HTTP."""

    def __init__(self, url: str, *, model: str | None = None, api_key: str | None = None):
        """Asks the server for its models. Raises UserError when there is none."""
        self._base = url.rstrip("/").removesuffix("/v1")
        if not self._base.startswith(("http://", "https://")):
            raise UserError(f"'{url}' is not the address of a server.", fix="Write it as http://127.0.0.1:8000.")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        with self._open("/v1/models") as response:
            served = [entry["id"] for entry in json.load(response)["data"]]
        if not served:
            raise UserError(f"The server at {self._base} serves no model.")
        self.name: str = model or served[0]

    def answer(self, messages: Messages, options: dict[str, Any]) -> Iterator[Piece]:
        renamed = {("max_completion_tokens" if name == "max_tokens" else name): v for name, v in options.items()}
        body = {"model": self.name, "messages": messages, "stream": True, **renamed}
        with self._open("/v1/chat/completions", body) as response:
            for line in response:
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                event = json.loads(data)
                if event.get("error"):
                    raise PhalanxError(str(event["error"].get("message", "The server failed.")))
                for choice in event.get("choices", ()):
                    text = choice["delta"].get("content") or ""
                    # One event carries one token, or a few at once that became text together.
                    yield Piece(text, 1 if text else 0, choice.get("finish_reason"))
        raise PhalanxError("The server ended the answer before its end.")

    def close(self) -> None:
        """Nothing is kept open."""

    def _open(self, path: str, body: dict[str, Any] | None = None) -> http.client.HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + path, data, self._headers)  # noqa: S310 (checked in __init__)
        try:
            response: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=600)  # noqa: S310
            return response
        except urllib.error.HTTPError as error:
            raise UserError(f"The server at {self._base} answered {error.code}: {_said(error)}") from None
        except (urllib.error.URLError, OSError) as error:
            reason = getattr(error, "reason", error)
            fix = "Start it with 'phalanx serve', or check the address."
            raise UserError(f"No server answers at {self._base}: {reason}.", fix=fix) from None


def _said(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.loads(error.read(65536))["error"]["message"])
    except (ValueError, KeyError, TypeError, OSError):
        return error.reason or "no reason given."
