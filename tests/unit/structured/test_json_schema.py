"""What is looked at before any compiler: size, depth, references."""

from __future__ import annotations

import json

import pytest

from phalanx.errors import InvalidRequest
from phalanx.structured.json_schema import checked_schema


def check(schema, max_bytes=1000, max_depth=5):
    return checked_schema(schema, max_bytes=max_bytes, max_depth=max_depth, param="p")


@pytest.mark.parametrize(
    "schema",
    [
        {},
        True,
        {"type": "object", "properties": {"ü": {"enum": [1, 2.5, None, "x"]}}},
        {"$defs": {"a": {}}, "items": {"$ref": "#/$defs/a"}},
        {"properties": {"$ref": {"type": "string"}}},
        {"items": {"items": {"items": {"items": {}}}}},
    ],
)
def test_what_is_fine_comes_back_as_text(schema):
    assert json.loads(check(schema)) == schema
    assert check(json.dumps(schema)) == check(schema)


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({"items": {"items": {"items": {"items": {"items": {"items": {}}}}}}}, "deeper"),
        ('{"items": ' * 10 + "1" + "}" * 10, "deeper"),
        ("[" * 900, "deeper"),
        ({"enum": ["x" * 1000]}, "larger"),
        ({"enum": ["ü" * 500]}, "larger"),
        (" " * 2000, "larger"),
        ("nope", "not valid JSON"),
        ('{"minimum": Infinity}', "not valid JSON"),
        ("3", "must be an object"),
        ('"text"', "must be an object"),
        ([1], "must be an object"),
        ({"minimum": float("nan")}, "cannot express"),
        ({"minimum": float("inf")}, "cannot express"),
        ({"const": "\ud800"}, "cannot express"),
        ({"const": {1, 2}}, "cannot express"),
        ({"$ref": "http://example.org/x"}, "leaves the document"),
        ({"items": [{"anyOf": [{"$ref": "other.json#/a"}]}]}, "leaves the document"),
        ({"$dynamicRef": "//example.org"}, "leaves the document"),
    ],
)
def test_what_is_not(schema, word):
    with pytest.raises(InvalidRequest, match=word) as caught:
        check(schema)
    assert (caught.value.param, caught.value.code) == ("p", "invalid_json_schema")


def test_nesting_beyond_any_stack():
    schema: dict = {}
    for _ in range(200_000):
        schema = {"items": schema}
    with pytest.raises(InvalidRequest, match="deeper"):
        check(schema)


def test_brackets_within_strings_do_not_count():
    assert check('{"const": "[[[[[[[[[[{{{{{{{\\"[[[["}')
