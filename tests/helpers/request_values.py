"""Values of request fields at and beyond their limits, as JSON text, and the status that each must get.

For a model with the demo model's vocabulary and a context of 4096 tokens.
"""

from __future__ import annotations

import json
from typing import Any

OK, BAD = 200, 400

HUGE = {2**31, 2**63, -(2**63), 10**30}
NOT_NUMBERS: tuple[str, ...] = ("true", '"1"', "[]", "[1]", "{}", "NaN", "Infinity", "-Infinity", "1e400", "9" * 5000)


def integer(low: int, high: int) -> dict[str, int]:
    """JSON text of a value to the status it must get."""
    cases = {str(low): OK, str(low - 1): BAD, str(high): OK, str(high + 1): BAD, "1.5": BAD, "null": OK}
    cases.update({str(value): BAD for value in HUGE if not low <= value <= high})
    cases.update(dict.fromkeys(NOT_NUMBERS, BAD))
    return cases


def number(low: float, high: float, *, low_open: bool = False) -> dict[str, int]:
    cases = {str(low): BAD if low_open else OK, str(low - 0.01): BAD, str(high): OK, str(high + 0.01): BAD, "null": OK}
    cases.update({str(value): BAD for value in HUGE})
    cases.update(dict.fromkeys(NOT_NUMBERS, BAD))
    return cases


def listing(item: str, limit: int, bad_items: tuple[str, ...]) -> dict[str, int]:
    def of(count: int) -> str:
        return "[" + ",".join([item] * count) + "]"

    cases = {of(1): OK, of(limit): OK, of(limit + 1): BAD, "null": OK, "5": BAD, "true": BAD, "{}": BAD}
    return {**cases, **{f"[{bad}]": BAD for bad in bad_items}}


BAD_TOKENS = ("-1", "49152", "2147483648", "9223372036854775808", "1e400", "NaN", "true", '"1"', "null", "1.5", "[1]")
BAD_TEXTS = ('""', "1", "null", "true", "[]", '"' + "x" * 257 + '"')

TABLE: dict[str, dict[str, int]] = {
    "n": {**integer(1, 128), "129": BAD},
    "temperature": number(0, 2),
    "top_p": number(0, 1, low_open=True),
    "top_k": {**integer(-1, 2**31 - 1), "0": OK},
    "min_p": number(0, 1),
    "presence_penalty": number(-2, 2),
    "frequency_penalty": number(-2, 2),
    "repetition_penalty": number(0, 100, low_open=True),
    "seed": {
        "0": OK,
        str(2**63): OK,
        str(2**64): BAD,
        str(-(2**63)): OK,
        str(-(2**63) - 1): BAD,
        "true": BAD,
        '"1"': BAD,
        "1.5": BAD,
        "NaN": BAD,
        "1e400": BAD,
        "null": OK,
        "9" * 5000: BAD,
    },
    "min_tokens": {
        "0": OK,
        "4": OK,
        "5": BAD,
        "-1": BAD,
        str(2**31): BAD,
        str(2**63): BAD,
        "true": BAD,
        '"1"': BAD,
        "null": OK,
    },
    "prompt_logprobs": integer(0, 20),
    "priority": {"0": OK, "-5": OK, str(2**31): BAD, str(2**63): BAD, "true": BAD, '"1"': BAD, "1.5": BAD, "null": OK},
    "truncate_prompt_tokens": {
        "1": OK,
        "-1": OK,
        "0": BAD,
        "-2": BAD,
        "true": BAD,
        '"1"': BAD,
        "null": OK,
        "1e400": BAD,
    },
    "stop": {
        **listing('"x"', 16, BAD_TEXTS),
        '"x"': OK,
        '""': BAD,
        '"' + "x" * 256 + '"': OK,
        '"' + "x" * 257 + '"': BAD,
    },
    "bad_words": listing('"x"', 128, BAD_TEXTS),
    "stop_token_ids": listing("5", 1024, BAD_TOKENS),
    "allowed_token_ids": listing("5", 1024, BAD_TOKENS),
    "logit_bias": {
        '{"5": 100}': OK,
        '{"5": -100}': OK,
        '{"5": 100.1}': BAD,
        '{"5": -101}': BAD,
        '{"-1": 1}': BAD,
        '{"49152": 1}': BAD,
        '{"2147483648": 1}': BAD,
        '{"9223372036854775808": 1}': BAD,
        '{"5": 1e400}': BAD,
        '{"5": NaN}': BAD,
        '{"5": true}': BAD,
        '{"5": "1"}': BAD,
        '{"5": null}': BAD,
        '{"1.5": 1}': BAD,
        '{"": 1}': BAD,
        '{"+5": 1}': BAD,
        '{" 5": 1}': BAD,
        "[]": BAD,
        "5": BAD,
        "null": OK,
        "{}": OK,
        json.dumps({str(i): 1 for i in range(1024)}): OK,
        json.dumps({str(i): 1 for i in range(1025)}): BAD,
    },
    "ignore_eos": {"true": OK, "false": OK, "null": OK, "1": BAD, '"true"': BAD, "[]": BAD},
    "skip_special_tokens": {"true": OK, "null": OK, "0": BAD, '"no"': BAD},
    "include_stop_str_in_output": {"true": OK, "null": OK, "0": BAD},
    "stream": {"false": OK, "null": OK, "1": BAD, '"true"': BAD, "2147483648": BAD},
    "stream_options": {"{}": OK, "null": OK, "1": BAD, "true": BAD, '{"include_usage": 1}': BAD},
    "cache_salt": {
        '"a"': OK,
        '"' + "a" * 256 + '"': OK,
        '"' + "a" * 257 + '"': BAD,
        '""': BAD,
        "1": BAD,
        "true": BAD,
        "null": OK,
    },
    "request_id": {
        '"a"': OK,
        '"' + "a" * 128 + '"': OK,
        '"' + "a" * 129 + '"': BAD,
        '""': BAD,
        "1": BAD,
        '"\\n"': BAD,
        "null": OK,
    },
    "user": {'"a"': OK, "1": BAD, "null": OK},
    "model": {'"echo"': OK, "null": OK, "1": BAD, "true": BAD, "[]": BAD, '""': 404, '"nobody"': 404},
    "metadata": {
        "{}": OK,
        '{"a": "b"}': OK,
        '{"a": 1}': BAD,
        "[]": BAD,
        "1": BAD,
        "null": OK,
        json.dumps({str(i): "x" for i in range(17)}): BAD,
    },
    "structured_outputs": {
        '{"regex": "a+"}': OK,
        '{"choice": ["a"]}': OK,
        '{"choice": []}': BAD,
        '{"choice": [1]}': BAD,
        '{"regex": ""}': BAD,
        '{"regex": 1}': BAD,
        '{"json": 1}': BAD,
        "[]": BAD,
        "1": BAD,
        "null": OK,
        json.dumps({"regex": "a" * 70_000}): BAD,
        '{"json": "not json"}': BAD,
    },
    "response_format": {
        '{"type": "text"}': OK,
        '{"type": "json_object"}': OK,
        '{"type": "other"}': BAD,
        '{"type": 1}': BAD,
        "{}": BAD,
        "1": BAD,
        '"text"': BAD,
        "null": OK,
        '{"type": "json_schema", "json_schema": {}}': BAD,
        '{"type": "json_schema", "json_schema": {"schema": 1}}': BAD,
        '{"type": "json_schema", "json_schema": {"schema": {"type": 5}}}': BAD,
    },
}

COMPLETION = {
    "max_tokens": {
        "1": OK,
        "0": BAD,
        "-1": BAD,
        "4094": BAD,
        str(2**31): BAD,
        str(2**63): BAD,
        "1.5": BAD,
        "true": BAD,
        '"1"': BAD,
        "1e400": BAD,
        "NaN": BAD,
        "null": OK,
    },
    "logprobs": integer(0, 20),
    "echo": {"true": OK, "null": OK, "1": BAD},
    "add_special_tokens": {"true": OK, "null": OK, "1": BAD},
}

CHAT = {
    "max_tokens": {
        "1": OK,
        "0": BAD,
        "-1": BAD,
        str(2**31): BAD,
        str(2**63): BAD,
        "1.5": BAD,
        "true": BAD,
        '"1"': BAD,
        "null": OK,
    },
    "max_completion_tokens": {"4": OK, "0": BAD, "-1": BAD, str(2**31): BAD, "true": BAD, '"4"': BAD, "null": OK},
    "logprobs": {"true": OK, "false": OK, "null": OK, "1": BAD, '"true"': BAD},
    "top_logprobs": {"0": BAD, "null": OK, "-1": BAD, "21": BAD, str(2**63): BAD, "true": BAD, '"1"': BAD},
    "add_generation_prompt": {"true": OK, "null": OK, "1": BAD},
    "continue_final_message": {"false": OK, "null": OK, "1": BAD},
    "chat_template_kwargs": {
        "{}": OK,
        '{"a": 1}': OK,
        "null": OK,
        "[]": BAD,
        "1": BAD,
        json.dumps({f"k{i}": 1 for i in range(65)}): BAD,
    },
    "messages": {
        "[]": BAD,
        "null": BAD,
        "1": BAD,
        "{}": BAD,
        "[1]": BAD,
        '["a"]': BAD,
        "[[]]": BAD,
        "[{}]": BAD,
        json.dumps([{"role": "user", "content": "a"}] * 2049): BAD,
    },
}

PATHS: dict[str, tuple[dict[str, Any], dict[str, dict[str, int]]]] = {
    "/v1/completions": ({"prompt": "one two three", "max_tokens": 4}, {**TABLE, **COMPLETION}),
    "/v1/chat/completions": ({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}, {**TABLE, **CHAT}),
}
