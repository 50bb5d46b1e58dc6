"""Checks on a JSON Schema before any compiler sees it: size, depth, and references that would leave the document.

Covers what makes a schema expensive or unsafe. Whether it means anything is for the grammar library to say.
"""

from __future__ import annotations

import json
from typing import Any

from phalanx.errors import InvalidRequest

Schema = dict[str, Any] | bool


def checked_schema(schema: dict[str, Any] | str | bool, *, max_bytes: int, max_depth: int, param: str) -> str:
    """The schema as compact JSON text.

    Raises InvalidRequest when it is not an object (or a boolean), has more than `max_bytes` bytes, is nested deeper
    than `max_depth`, or refers to anything outside itself.
    """
    if isinstance(schema, str):
        if len(schema) > max_bytes:
            _too_large(max_bytes, param)
        _check_text_depth(schema, max_depth, param)
        try:
            schema = json.loads(schema, parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            raise InvalidRequest(
                "The JSON Schema is not valid JSON.", param=param, code="invalid_json_schema"
            ) from None
    if not isinstance(schema, (dict, bool)):
        raise InvalidRequest("A JSON Schema must be an object.", param=param, code="invalid_json_schema")
    _walk(schema, max_depth, param)
    try:
        text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        size = len(text.encode("utf-8"))
    except (TypeError, ValueError):  # lone surrogates, numbers that JSON lacks, values that are not JSON
        raise InvalidRequest(
            "The JSON Schema holds a value that JSON cannot express.", param=param, code="invalid_json_schema"
        ) from None
    if size > max_bytes:
        _too_large(max_bytes, param)
    return text


def _refuse_constant(name: str) -> None:
    raise ValueError(name)


def _too_large(max_bytes: int, param: str) -> None:
    raise InvalidRequest(
        f"The JSON Schema is larger than {max_bytes} bytes.",
        fix="Send a smaller one.",
        param=param,
        code="invalid_json_schema",
    )


def _too_deep(max_depth: int, param: str) -> None:
    raise InvalidRequest(
        f"The JSON Schema is nested deeper than {max_depth} levels.",
        fix="Flatten it with $defs.",
        param=param,
        code="invalid_json_schema",
    )


def _check_text_depth(text: str, max_depth: int, param: str) -> None:
    """Brackets outside strings, counted without a parser's stack."""
    depth, in_string, escaped = 0, False, False
    for char in text:
        if in_string:
            if escaped:
                escaped = False
            elif char == "\\":
                escaped = True
            elif char == '"':
                in_string = False
        elif char == '"':
            in_string = True
        elif char in "{[":
            depth += 1
            if depth > max_depth:
                _too_deep(max_depth, param)
        elif char in "}]":
            depth -= 1


def _walk(schema: Schema, max_depth: int, param: str) -> None:
    """Depth and references, level by level, so that no nesting can exhaust the stack."""
    level: list[Any] = [schema]
    depth = 0
    while level:
        depth += 1
        if depth > max_depth + 1:  # the last level may hold leaves
            _too_deep(max_depth, param)
        below: list[Any] = []
        for node in level:
            if isinstance(node, dict):
                for key, value in node.items():
                    if not isinstance(key, str):
                        raise InvalidRequest(
                            "The keys of a JSON Schema must be strings.", param=param, code="invalid_json_schema"
                        )
                    if key in ("$ref", "$dynamicRef", "$recursiveRef") and isinstance(value, str):
                        _check_reference(value, param)
                below.extend(node.values())
            elif isinstance(node, (list, tuple)):
                below.extend(node)
        level = below


def _check_reference(reference: str, param: str) -> None:
    if not reference.startswith("#"):
        raise InvalidRequest(
            "A `$ref` of the JSON Schema leaves the document; nothing is fetched.",
            fix="Put what it refers to under $defs.",
            param=param,
            code="invalid_json_schema",
        )
