"""Keys that come from one secret."""

from __future__ import annotations

import hashlib
import hmac

from phalanx.executor.keys import derive, root_secret


def test_it_is_hkdf() -> None:
    """Against the two steps of RFC 5869, written out."""
    extracted = hmac.new(b"phalanx transport 1", b"secret", hashlib.sha256).digest()
    info = b"\0\0\0\x05probe\0\0\0\x011"
    assert derive(b"secret", "probe", "1") == hmac.new(extracted, info + b"\x01", hashlib.sha256).digest()


def test_contexts_do_not_run_together() -> None:
    keys = [derive(b"s", *context) for context in (("ab", "c"), ("a", "bc"), ("abc",), ("a", "b", "c"), ())]
    assert len(set(keys)) == len(keys)
    assert all(len(key) == 32 for key in keys)


def test_roots() -> None:
    assert root_secret("one", 1) == root_secret("one", 2), "a key is the same whatever the port"
    assert root_secret("one", 1) != root_secret("two", 1)
    assert root_secret(None, 1) == root_secret("", 1) != root_secret(None, 2)
    assert root_secret("1", 1) != root_secret(None, 1)
