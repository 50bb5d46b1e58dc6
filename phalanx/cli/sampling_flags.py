"""The sampling flags that `generate` and `chat` share, and the `SamplingParams` they make.

A flag that is not given leaves the model's own default (its generation_config.json) in place.
"""

from __future__ import annotations

import argparse
from typing import Any

from phalanx.cli.messages import UsageError
from phalanx.config import parse_size
from phalanx.errors import ConfigError, InvalidRequest
from phalanx.sampling_params import SamplingParams

_INTEGERS = {
    "top_k": "Keep only the K most likely tokens; 0 keeps all.",
    "min_tokens": "Do not end before this many tokens.",
}
_NUMBERS = {
    "temperature": "0 always takes the most likely token; higher is more varied, up to 2.",
    "top_p": "Keep the most likely tokens that make up this share, above 0 and at most 1.",
    "min_p": "Keep tokens at least this likely, relative to the most likely one.",
    "presence_penalty": "Make tokens that occurred less likely, -2 to 2.",
    "frequency_penalty": "The same, growing with each occurrence.",
    "repetition_penalty": "Divide the scores of tokens that occurred; 1 is off.",
}


def add_sampling_flags(parser: argparse.ArgumentParser, *, max_tokens: str) -> None:
    """Add the flags to `parser`; `max_tokens` says what happens without `--max-tokens`."""
    group = parser.add_argument_group("sampling")
    absent: Any = argparse.SUPPRESS
    text = f"Longest answer in tokens. Default: {max_tokens}."
    group.add_argument("--max-tokens", metavar="N", default=absent, help=text)
    for name, help_text in {**_NUMBERS, **_INTEGERS}.items():
        metavar = "N" if name in _INTEGERS else "X"
        group.add_argument("--" + name.replace("_", "-"), metavar=metavar, default=absent, help=help_text)
    group.add_argument(
        "--stop", metavar="TEXT", action="append", default=absent, help="End before this text. May be repeated."
    )
    group.add_argument("--ignore-eos", action="store_true", default=absent, help="Go on after the end-of-text token.")


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    """The `SamplingParams` fields that were given. Raises UsageError for a value that is no number or out of range."""
    given: dict[str, Any] = {}
    for name, kind in {**dict.fromkeys(_INTEGERS, int), **dict.fromkeys(_NUMBERS, float)}.items():
        if hasattr(args, name):
            given[name] = _number(name, getattr(args, name), kind)
    if hasattr(args, "max_tokens"):
        try:
            given["max_tokens"] = parse_size(args.max_tokens)
        except ConfigError as error:
            raise UsageError(f"--max-tokens: {error.message}", fix=error.fix) from None
    if hasattr(args, "stop"):
        given["stop"] = tuple(args.stop)
    if hasattr(args, "ignore_eos"):
        given["ignore_eos"] = True
    try:
        SamplingParams(**{"max_tokens": None, **given})
    except InvalidRequest as error:
        raise UsageError(error.message, fix=error.fix) from None
    return given


def _number(name: str, text: str, kind: type[int] | type[float]) -> int | float:
    try:
        return kind(text)
    except ValueError:
        what = "an integer" if kind is int else "a number"
        raise UsageError(f"--{name.replace('_', '-')} is '{text}', which is not {what}.") from None
