"""What the environment of the processes that we start is made of."""

from __future__ import annotations

import pytest

from phalanx import env


def test_threads_of_an_engine_spin_briefly_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert env.for_engine()["GOMP_SPINCOUNT"] == "1000"
    assert env.for_engine()["OMP_NUM_THREADS"] == "2"
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    assert env.for_engine()["GOMP_SPINCOUNT"] == "7"
    monkeypatch.delenv("GOMP_SPINCOUNT")
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert "GOMP_SPINCOUNT" not in env.for_engine()


def test_prepared_products_are_bounded(monkeypatch):
    monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", raising=False)
    assert env.for_engine()["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "256"
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "9")
    assert env.for_engine()["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "9"


def test_what_computing_depends_on_is_shown_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    monkeypatch.setenv("PHALANX_API_KEY", "secret")
    monkeypatch.setenv("HF_TOKEN", "secret")
    shown = env.computing()
    assert shown["NCCL_SOCKET_IFNAME"] == "ib0"
    assert "secret" not in shown.values()
