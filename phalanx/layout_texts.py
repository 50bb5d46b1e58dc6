"""What people write about a layout (`3,1`, `20,10`, `fast=1`, `10.0.0.1:29600`), checked and in its normal form."""

from __future__ import annotations

import re

from phalanx.errors import ConfigError

ROUTER_PORT = 29600


def parse_tensor_split(text: str) -> str:
    """`auto`, or shares above zero: `3,1`, and `2,1;1` for stages. Returns them without blanks. Raises ConfigError."""
    plain = re.sub(r"\s+", "", text)
    number = r"\d{1,9}(\.\d{1,9})?"
    shares = rf"{number}(,{number})*"
    if plain != "auto" and not (
        re.fullmatch(rf"{shares}(;{shares})*", plain, re.ASCII) and all(float(n) > 0 for n in re.split("[,;]", plain))
    ):
        raise ConfigError(
            f"'{text[:80]}' is not a tensor split.",
            fix="Write a share above zero for each rank, such as 3,1 (with ; between pipeline stages), or auto.",
        )
    return plain


def parse_pipeline_split(text: str) -> str:
    """`auto`, or whole numbers of layers: `20,10`. Returns them without blanks. Raises ConfigError."""
    plain = re.sub(r"\s+", "", text)
    if plain != "auto" and not _counts(plain):
        raise ConfigError(
            f"'{text[:80]}' is not a pipeline split.",
            fix="Write how many layers each stage gets, at least 1, such as 20,10, or auto.",
        )
    return plain


def parse_widths(text: str) -> str:
    """Whole numbers of ranks: `2,1`. Returns them without blanks. Raises ConfigError."""
    plain = re.sub(r"\s+", "", text)
    if not _counts(plain):
        raise ConfigError(
            f"'{text[:80]}' does not say how many tensor ranks each stage has.",
            fix="Write a number above zero for each pipeline stage, such as 2,1.",
        )
    return plain


def _counts(text: str) -> bool:
    return bool(re.fullmatch(r"[1-9]\d{0,5}(,[1-9]\d{0,5})*", text, re.ASCII))


def parse_resource(text: str) -> str:
    """`NAME=AMOUNT` with an amount above zero. Raises ConfigError."""
    name, equals, amount = text.partition("=")
    if not equals or not name.strip() or not re.fullmatch(r"\d+(\.\d+)?", amount, re.ASCII) or float(amount) <= 0:
        raise ConfigError(f"'{text[:80]}' is not a resource.", fix="Write NAME=AMOUNT, such as fast=1.")
    return text


def parse_label(text: str) -> str:
    """`KEY=VALUE`. Raises ConfigError."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip() or not value.strip():
        raise ConfigError(f"'{text[:80]}' is not a label.", fix="Write KEY=VALUE, such as zone=a.")
    return text


def parse_address(text: str) -> str:
    """`HOST:PORT`, `HOST`, `[fd00::1]:PORT` or `fd00::1`, with a port in any case: `10.0.0.1:29600`. Raises
    ConfigError."""
    plain = text.strip()
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\s:\[\]]+))(?::(\d{1,5}))?", plain, re.ASCII)
    host, port = (match[1] or match[2], int(match[3] or ROUTER_PORT)) if match else (plain, ROUTER_PORT)
    if not match and not re.fullmatch(r"[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*", plain, re.ASCII):
        raise ConfigError(f"'{text[:80]}' is not an address.", fix="Write ADDRESS:PORT, such as 10.0.0.1:29600.")
    if not 0 < port <= 65535:
        raise ConfigError(f"The port of '{text[:80]}' is {port}; it must be between 1 and 65535.")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """Host and port of what `parse_address` has returned."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
