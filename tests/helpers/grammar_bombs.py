"""Grammars that mean harm: those that must be refused, and those whose cost must be bounded."""

from __future__ import annotations

from typing import Any


def chain(arrow: str, template: str, count: int, last: str) -> str:
    return "\n".join(f"{template.format(i)} {arrow} {template.format(i + 1)}" for i in range(count)) + (
        f"\n{template.format(count)} {arrow} {last}\n"
    )


def doubling(arrow: str, name: str, count: int) -> str:
    return "".join(f"{name}{i} {arrow} {name}{i + 1} {name}{i + 1}\n" for i in range(count))


REFUSED: dict[str, dict[str, Any]] = {
    "30,000 levels as text": {"json": '{"items":' * 30_000 + "{}" + "}" * 30_000},
    "3,000 levels as text": {"json": '{"items":' * 3_000 + "{}" + "}" * 3_000},
    "brackets without end": {"json": "[" * 60_000},
    "brackets in a string are none": {"json": '{"const": "' + "[" * 70_000 + '"}'},
    "too large": {"json": {"enum": [str(i) for i in range(100_000)]}},
    "a reference to itself": {"json": {"$ref": "#"}},
    "references in a circle": {
        "json": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    },
    "a circle of allOf": {"json": {"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}] * 2}}, "$ref": "#/$defs/a"}},
    "a reference to nothing": {"json": {"$ref": "#/$defs/missing"}},
    "a remote reference": {"json": {"$ref": "http://127.0.0.1:9/schema"}},
    "a reference to a file": {"json": {"items": {"$ref": "file:///etc/passwd"}}},
    "a relative reference": {"json": {"$id": "http://127.0.0.1:9/", "$ref": "other.json"}},
    "a remote reference in a grammar": {"grammar": 'start: %json {"$ref": "http://127.0.0.1:9/schema"}'},
    "allOf of anyOf": {
        "json": {"allOf": [{"anyOf": [{"properties": {f"a{i}": {"const": j}}} for j in range(4)]} for i in range(20)]}
    },
    "numbers beyond floats": {"json": '{"type": "number", "minimum": -1e400}'},
    "not a number": {"json": '{"minimum": NaN}'},
    "an integer of 10,000 digits": {"json": '{"minimum": ' + "9" * 10_000 + "}"},
    "an unknown type": {"json": {"type": "magic"}},
    "contradictions": {"json": {"allOf": [{"type": "string"}, {"type": "integer"}]}},
    "keywords nobody knows": {"json": {"not": {"type": "string"}}},
    "not JSON": {"json": '{"type"'},
    "not an object": {"json": "[1]"},
    "half a character": {"json": {"const": "\ud800"}},
    "a bad pattern": {"json": {"type": "string", "pattern": "("}},
    "regex: unclosed": {"regex": "(a"},
    "regex: backwards": {"regex": "[z-a]"},
    "regex: look-ahead": {"regex": "(?=a)b"},
    "regex: back reference": {"regex": r"(a)\1"},
    "regex: 30,000 levels": {"regex": "(" * 30_000 + "a" + ")" * 30_000},
    "regex: nothing matches": {"regex": r"[^\s\S]"},
    "regex: 30,000 optional parts": {"regex": "a?" * 30_000},
    "regex: half a character": {"regex": "\ud800"},
    "choice: empty text": {"choice": ("a", "")},
    "choice: too many": {"choice": tuple(f"choice {i}" for i in range(20_000))},
    "lark: itself": {"grammar": "start: start"},
    "lark: circle": {"grammar": "start: a\na: b\nb: a"},
    "lark: 4,000 rules deep": {"grammar": chain(":", "r{}", 4_000, '"a"').replace("r0 ", "start ", 1)},
    "lark: 30,000 levels": {"grammar": "start: " + "(" * 30_000 + '"a"' + ")" * 30_000},
    "lark: doubling 40 times": {"grammar": "start: T0\n" + doubling(":", "T", 40) + 'T40: "a"'},
    "lark: intersections": {"grammar": "start: A\nA: /(a|b)*a(a|b){200}/ & /(a|b)*b(a|b){200}/ & ~/(a|b)*a(a|b){199}/"},
    "lark: garbage": {"grammar": "start: :::"},
    "lark: no start": {"grammar": 'other: "a"'},
    "lark: 5,000 negations": {"grammar": "start: A\nA: " + "~" * 5_000 + "/a/"},
    "gbnf: itself": {"grammar": "root ::= root"},
    "gbnf: 3,000 rules deep": {"grammar": chain("::=", "r{}", 3_000, '"a"').replace("r0 ", "root ", 1)},
    "gbnf: doubling 40 times": {"grammar": "root ::= r0\n" + doubling("::=", "r", 40) + "r40 ::= r41\n"},
    "gbnf: unclosed": {"grammar": 'root ::= "'},
    "nothing but blanks": {"grammar": "   \n"},
}  # fmt: skip

BOUNDED: dict[str, dict[str, Any]] = {
    "an enum of 7,000": {"json": {"enum": [f"v{i}" for i in range(7_000)]}},
    "2,000 keys": {"json": {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(2_000)}}},
    "a billion items": {"json": {"type": "array", "items": {"type": "integer"}, "minItems": 10**9}},
    "a billion characters": {"json": {"type": "string", "minLength": 10**6, "maxLength": 10**9}},
    "a pattern of a billion": {"json": {"type": "string", "pattern": "^a{1,1000000000}$"}},
    "nested repeats": {"json": {"type": "string", "pattern": "^(a{1,1000}){1,1000}$"}},
    "regex: a billion": {"regex": "a{1,1000000000}"},
    "regex: exponential": {"regex": "(a|b)*a(a|b){300}"},
    "regex: more exponential": {"regex": "(.*a.{50}){20}"},
    "regex: nested repeats": {"regex": "(" * 20 + "a" + "{1,50})" * 20},
    "regex: 9,000 words": {"regex": "|".join(f"w{i}" for i in range(9_000))},
    "choice of 3,000": {"choice": tuple(f"choice number {i}" for i in range(3_000))},
    "a choice of 60,000 characters": {"choice": ("x" * 60_000,)},
    "lark: ambiguous": {"grammar": 'start: e\ne: e e | e e e | "a" |'},
    "lark: a trillion": {"grammar": "start: r0\n" + doubling(":", "r", 40) + 'r40: "a"'},
    "lark: a million": {"grammar": 'start: "a"{1000000}'},
    "lark: nothing at all": {"grammar": "start: a*\na: b*\nb: c*\nc: "},
    "gbnf: a billion": {"grammar": "root ::= [a-z]{1000000000}"},
    "recursion with a way out": {
        "json": {
            "$defs": {"a": {"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#/$defs/a"}}]}},
            "$ref": "#/$defs/a",
        }
    },
}  # fmt: skip
