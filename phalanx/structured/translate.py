"""From what a request asks for to the llguidance library's own grammar text.

Two steps: `checked` looks only at size and depth, at once; `translate` may take long on hostile input, as compiling
may, so both of those are tried in a process that can be killed (`grammar_worker`) before they run anywhere else.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import llguidance
from llguidance.gbnf_to_lark import any_to_lark

from phalanx.config import LimitsConfig
from phalanx.errors import InvalidRequest
from phalanx.sampling_params import StructuredOutputs
from phalanx.structured.json_schema import checked_schema

_WHITESPACE = r"\n?[ \t]{0,48}"
"""Between the tokens of JSON: room for pretty printing, but not for a model that goes on with blanks for ever."""


@dataclass(frozen=True)
class Wanted:
    """A checked wish. `kind` is json, regex, choice or grammar; `text` the schema, pattern, JSON list or grammar."""

    kind: str
    text: str
    param: str


def checked(wanted: StructuredOutputs, limits: LimitsConfig) -> Wanted:
    """Raises InvalidRequest when it is larger or deeper than `limits` allow."""
    size, depth = limits.max_grammar_bytes, limits.max_grammar_depth
    if wanted.json is not None:
        param = "structured_outputs.json"
        return Wanted("json", checked_schema(wanted.json, max_bytes=size, max_depth=depth, param=param), param)
    if wanted.json_object:
        return Wanted("json", '{"type":"object"}', "structured_outputs.json_object")
    if wanted.choice is not None:
        param = "structured_outputs.choice"
        if not all(wanted.choice):
            raise InvalidRequest("`choice` must not contain an empty string.", param=param)
        text = json.dumps(list(dict.fromkeys(wanted.choice)))
        return Wanted("choice", _sized("choice", text, size, param), param)
    if wanted.regex is not None:
        param = "structured_outputs.regex"
        return Wanted("regex", _shallow("regex", _sized("regex", wanted.regex, size, param), depth, param), param)
    param, text = "structured_outputs.grammar", wanted.grammar or ""
    return Wanted("grammar", _shallow("grammar", _sized("grammar", text, size, param), depth, param), param)


def translate(kind: str, text: str) -> str:
    """The library's grammar text. Raises ValueError with the reason."""
    matcher = llguidance.LLMatcher
    if kind == "json":
        return matcher.grammar_from_json_schema(text, defaults={"whitespace_pattern": _WHITESPACE})
    if kind == "choice":  # a terminal, since the parser bounds the alternatives of a rule
        choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in json.loads(text))
        return matcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}")
    if kind == "regex":
        return matcher.grammar_from_regex(text)
    try:
        return matcher.grammar_from_lark(any_to_lark(text))
    except Exception as error:  # its own kind, and whatever a broken grammar trips in it
        raise ValueError(reason(str(error))) from None


def parser_limits() -> llguidance.LLParserLimits:
    """What the library may spend on one grammar. Its errors must not quote the grammar at length."""
    return llguidance.LLParserLimits(
        max_items_in_row=10_000, max_lexer_states=20_000, max_grammar_size=100_000, verbose_errors=False
    )


def reason(message: str) -> str:
    """The library's message on one line, of bounded length."""
    text = " ".join(message.replace("<non-verbose/>", "").split())[:200]
    return "nothing matches it" if text.startswith("NoExtension") else text


def _sized(name: str, text: str, most: int, param: str) -> str:
    try:
        size = len(text.encode("utf-8"))
    except UnicodeEncodeError:
        raise InvalidRequest(f"`{name}` holds half of a character (a lone surrogate).", param=param) from None
    if size > most:
        raise InvalidRequest(f"`{name}` is larger than {most} bytes.", fix="Send a smaller one.", param=param)
    return text


def _shallow(name: str, text: str, most: int, param: str) -> str:
    """Counts the brackets that are open at the same time, wherever they stand: no parser can meet a deeper nesting."""
    depth = 0
    for char in text:
        if char in "([{":
            depth += 1
            if depth > most:
                raise InvalidRequest(f"`{name}` is nested deeper than {most} levels.", fix="Flatten it.", param=param)
        elif char in ")]}" and depth:
            depth -= 1
    return text
