"""Hiding secrets in what is printed: keys, tokens and passwords, by the name of what holds them and by their shape."""

from __future__ import annotations

import re

HIDDEN = "<hidden>"

_SECRET_NAME = re.compile(r"key(?!file)|token(?!izer)|secret|passw|credential|auth", re.IGNORECASE)
_CREDENTIALS_IN_URL = re.compile(r"(?<=://)[^/\s@]+(?=@)")
_SECRET_SHAPE = re.compile(r"\b(?:hf_|sk-|gh[pousr]_|xox[abp]-|AKIA)[A-Za-z0-9_-]{8,}")


def redact(name: str, value: str) -> str:
    """`value` as it may be shown for something called `name`."""
    if value and _SECRET_NAME.search(name):
        return HIDDEN
    return _SECRET_SHAPE.sub(HIDDEN, _CREDENTIALS_IN_URL.sub(HIDDEN, value))
