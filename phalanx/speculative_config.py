"""What `--speculative-config` says: how tokens are proposed before the model has computed them.

Names and meanings are vLLM's, as far as they are here. The option is a JSON object, or a mapping in Python; its normal
form is JSON with every field filled in.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from phalanx.errors import ConfigError

METHOD = "ngram"
MOST_TOKENS = 64
"""Largest `num_speculative_tokens`, and longest n-gram."""

_LOOKUP = 5
"""Both bounds of the n-gram where neither is given."""
_EXAMPLE = '\'{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}\''


@dataclass(frozen=True)
class SpeculativeConfig:
    """Propose what followed the last few tokens where they occurred before, in the prompt or in the answer."""

    method: str
    num_speculative_tokens: int
    """Most tokens proposed for one request in one step."""
    prompt_lookup_max: int
    """Longest n-gram that is looked for, in tokens."""
    prompt_lookup_min: int
    """Shortest that counts as found."""


def parse_speculative_config(given: str | Mapping[str, Any]) -> str:
    """The normal form of the option's text, or of the mapping given in Python. Raises ConfigError."""
    return json.dumps(asdict(read_speculative_config(given)))


def read_speculative_config(given: str | Mapping[str, Any]) -> SpeculativeConfig:
    """Raises ConfigError."""
    wanted = _object(given)
    method, here = wanted.get("method"), f"The one method is {METHOD}: {_EXAMPLE}"
    if method not in (None, METHOD):  # whose fields are others
        raise ConfigError(f"--speculative-config names the method '{str(method)[:80]}', which is not here.", fix=here)
    names = [field.name for field in fields(SpeculativeConfig)]
    for name in wanted:
        if name not in names:
            close = difflib.get_close_matches(str(name), names, 1)
            raise ConfigError(
                f"--speculative-config has no field '{str(name)[:80]}'.",
                fix=f"Did you mean '{close[0]}'?" if close else f"The fields are {', '.join(names)}.",
            )
    if method is None:
        raise ConfigError("--speculative-config needs a method.", fix=here)
    if "num_speculative_tokens" not in wanted:
        raise ConfigError("--speculative-config needs num_speculative_tokens.", fix=f"Such as {_EXAMPLE}")
    longest, shortest = wanted.get("prompt_lookup_max"), wanted.get("prompt_lookup_min")
    config = SpeculativeConfig(
        METHOD,
        _count("num_speculative_tokens", wanted["num_speculative_tokens"]),
        _count("prompt_lookup_max", longest if longest is not None else shortest if shortest is not None else _LOOKUP),
        _count("prompt_lookup_min", shortest if shortest is not None else longest if longest is not None else _LOOKUP),
    )
    if config.prompt_lookup_min > config.prompt_lookup_max:
        raise ConfigError(
            f"--speculative-config: prompt_lookup_min is {config.prompt_lookup_min}, more than prompt_lookup_max, "
            f"{config.prompt_lookup_max}."
        )
    return config


def _object(given: str | Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            raise ConfigError("--speculative-config is not valid JSON.", fix=f"Such as {_EXAMPLE}") from None
    if not isinstance(given, Mapping):
        raise ConfigError("--speculative-config must be a JSON object.", fix=f"Such as {_EXAMPLE}")
    return given


def _count(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST_TOKENS:
        raise ConfigError(f"--speculative-config: {name} must be a whole number from 1 to {MOST_TOKENS}.")
    return value
