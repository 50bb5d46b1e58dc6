"""One secret, many keys: HKDF with SHA-256 (RFC 5869), so that no secret and no key ever crosses the network.

Nodes share a transport key. What each connection proves and is sealed with is derived from it by what the connection
is for and by numbers drawn for the occasion; learning one derived key tells nothing of the others.
"""

from __future__ import annotations

import hmac

_SALT = b"phalanx transport 1"


def derive(secret: bytes, *context: str | bytes) -> bytes:
    """32 bytes for one purpose. Different contexts give unrelated keys: each part is written with its length."""
    info = b"".join(len(part).to_bytes(4, "big") + part for part in map(_bytes, context))
    extracted = hmac.digest(_SALT, secret, "sha256")
    return hmac.digest(extracted, info + b"\x01", "sha256")


def root_secret(transport_key: str | None, master_port: int) -> bytes:
    """What a node's keys come from. Without a transport key it is no secret: it only keeps apart nodes that meet at
    different ports, and anybody who can connect can work it out."""
    if transport_key:
        return derive(transport_key.encode(), "transport key")
    return derive(b"", "no transport key", str(master_port))


def _bytes(part: str | bytes) -> bytes:
    return part.encode() if isinstance(part, str) else part
