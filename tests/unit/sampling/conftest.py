"""Sampling tests hold for the native kernels and for their twins."""

import pytest

from phalanx.kernels import sampling as kernels


@pytest.fixture(autouse=True, params=["native", "twins"])
def served_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "twins":
        monkeypatch.setattr(kernels, "native", lambda: None)
    elif kernels.native() is None:
        pytest.skip("the native library was not built")
    return request.param
