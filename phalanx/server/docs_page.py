"""GET /docs: the API on one page, rendered from the OpenAPI document. No script and nothing from elsewhere, so that it
works without a network and under the strictest content policy."""

from __future__ import annotations

import json
from html import escape
from typing import Any

_STYLE = """
:root{color-scheme:light dark;--line:#8884;--soft:#8882;--get:#2a7;--post:#27c}
body{font:16px/1.55 system-ui,sans-serif;max-width:60rem;margin:0 auto;padding:2rem 1rem 4rem}
h1{margin:0}h2{margin:2.2rem 0 .6rem;font-size:1.15rem}
code,pre{font:.86rem/1.5 ui-monospace,monospace}
pre{background:var(--soft);padding:.8rem;border-radius:.5rem;overflow-x:auto}
details{border:1px solid var(--line);border-radius:.5rem;margin:.5rem 0;padding:.5rem .8rem}
summary{cursor:pointer}
summary b{font:600 .8rem ui-monospace,monospace;display:inline-block;min-width:3.2rem;color:var(--get)}
summary b.POST{color:var(--post)}summary code{font-weight:600;margin-right:.8rem}
table{border-collapse:collapse;width:100%;margin:.6rem 0}
td,th{text-align:left;vertical-align:top;padding:.25rem .6rem .25rem 0;border-top:1px solid var(--line)}
"""

HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"}


def render(document: dict[str, Any], address: str) -> str:
    """`address`: what the examples call, such as `http://127.0.0.1:8000`."""
    groups: dict[str, list[str]] = {}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            section = _operation(document, address, path, method.upper(), operation)
            groups.setdefault(operation["tags"][0], []).append(section)
    body = "".join(f"<h2>{escape(name)}</h2>{''.join(sections)}" for name, sections in groups.items())
    info = document["info"]
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>{escape(info['title'])} API</title><style>{_STYLE}</style>"
        f"<h1>{escape(info['title'])} <small>{escape(info['version'])}</small></h1>"
        f"<p>An OpenAI-compatible API. The machine-readable form is <a href='openapi.json'>openapi.json</a>; "
        f"any OpenAI client works with the base URL <code>{escape(address)}/v1</code>.</p>{body}"
    )


def _operation(document: dict[str, Any], address: str, path: str, method: str, operation: dict[str, Any]) -> str:
    request = operation.get("requestBody", {}).get("content", {}).get("application/json")
    command = f"curl {address}{path}"
    fields = ""
    if request is not None:
        example = json.dumps(request.get("example", {}))
        command = f"curl {address}{path} \\\n  -H 'Content-Type: application/json' \\\n  -d '{example}'"
        fields = _fields(_resolve(document, request["schema"]))
    return (
        f"<details><summary><b class={method}>{method}</b> <code>{escape(path)}</code> {escape(operation['summary'])}"
        f"</summary><pre>{escape(command)}</pre>{fields}</details>"
    )


def _resolve(document: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    name = schema.get("$ref", "").rpartition("/")[2]
    return document["components"]["schemas"].get(name, schema)  # type: ignore[no-any-return]


def _fields(schema: dict[str, Any]) -> str:
    required = set(schema.get("required", ()))
    rows = []
    for name, field in schema.get("properties", {}).items():
        limits = [f"{sign} {field[key]}" for key, sign in (("minimum", "≥"), ("maximum", "≤")) if key in field]
        notes = [field.get("description", ""), ", ".join(limits), "required" if name in required else ""]
        note = escape(" · ".join(filter(None, notes)))
        rows.append(f"<tr><td><code>{escape(name)}</code><td>{escape(_kind(field))}<td>{note}")
    return f"<table><tr><th>Field<th>Type<th>{''.join(rows)}</table>"


def _kind(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        return "object"
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_kind(option) for option in schema["anyOf"] if option.get("type") != "null"))
    kind = str(schema.get("type", "any"))
    return f"list of {_kind(schema.get('items', {}))}" if kind == "array" else kind
