"""Checks on a JSON Schema before any compiler sees it: size, depth, and references that would leave the document.

Covers what makes a schema expensive or unsafe. Whether it means anything is for the grammar library to say.
"""

from __future__ import annotations

import json
from typing import Any

from phalanx.errors import InvalidRequest


def checked_schema(schema: dict[str, Any] | str | bool, *, max_bytes: int, max_depth: int, param: str) -> str:
    """The schema as compact JSON text.

    Raises InvalidRequest when it is not an object (or a boolean), has more than `max_bytes` bytes, is nested deeper
    than `max_depth`, or refers to anything outside itself.
    """
    if isinstance(schema, str):
        if len(schema) > max_bytes:
            raise _too_large(max_bytes, param)
        _check_text_depth(schema, max_depth, param)
        try:
            schema = json.loads(schema, parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            raise _invalid("The JSON Schema is not valid JSON.", param) from None
    if not isinstance(schema, (dict, bool)):
        raise _invalid("A JSON Schema must be an object.", param)
    try:
        text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        size = len(text.encode("utf-8"))
    except RecursionError:
        raise _too_deep(max_depth, param) from None
    except (TypeError, ValueError):  # lone surrogates, numbers that JSON lacks, values that are not JSON
        raise _invalid("The JSON Schema holds a value that JSON cannot express.", param) from None
    if size > max_bytes:
        raise _too_large(max_bytes, param)
    _walk(schema, max_depth, param)
    return text


def _invalid(message: str, param: str, fix: str | None = None) -> InvalidRequest:
    return InvalidRequest(message, fix=fix, param=param, code="invalid_json_schema")


def _too_large(max_bytes: int, param: str) -> InvalidRequest:
    return _invalid(f"The JSON Schema is larger than {max_bytes} bytes.", param, "Send a smaller one.")


def _too_deep(max_depth: int, param: str) -> InvalidRequest:
    return _invalid(f"The JSON Schema is nested deeper than {max_depth} levels.", param, "Flatten it with $defs.")


def _refuse_constant(name: str) -> None:
    raise ValueError(name)


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
                raise _too_deep(max_depth, param)
        elif char in "}]":
            depth -= 1


def _walk(schema: dict[str, Any] | bool, max_depth: int, param: str) -> None:
    """Depth and references, level by level, so that no nesting can exhaust the stack."""
    level: list[Any] = [schema]
    depth = 0
    while level:
        depth += 1
        if depth > max_depth + 1:  # the last level may hold leaves
            raise _too_deep(max_depth, param)
        below: list[Any] = []
        for node in level:
            if isinstance(node, dict):
                for key in ("$ref", "$dynamicRef", "$recursiveRef"):
                    if isinstance(target := node.get(key), str) and not target.startswith("#"):
                        raise _invalid(
                            f"A `{key}` of the JSON Schema leaves the document; nothing is fetched.",
                            param,
                            "Put what it refers to under $defs.",
                        )
                below.extend(node.values())
            elif isinstance(node, (list, tuple)):
                below.extend(node)
        level = below
