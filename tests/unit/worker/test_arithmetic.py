"""The check of PyTorch's products: quiet when they are right, an error when any part of a result is wrong."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from phalanx import env
from phalanx.errors import ConfigError
from phalanx.worker.arithmetic import check_products

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_right_products_pass(dtype: torch.dtype) -> None:
    check_products(dtype)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, 200.0])
def test_one_wrong_number_is_noticed(monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    linear = torch.nn.functional.linear

    def broken(*arguments: torch.Tensor) -> torch.Tensor:
        result = linear(*arguments)
        result[3, 1000] = value
        return result

    monkeypatch.setattr(torch.nn.functional, "linear", broken)
    with pytest.raises(ConfigError, match="wrong bfloat16 products"):
        check_products(torch.bfloat16)


def test_too_few_threads_never_go_unnoticed() -> None:
    """With this setting the CPU library may leave out half of every product."""
    code = """
import torch
from phalanx.errors import ConfigError
from phalanx.worker.arithmetic import check_products
torch.set_num_threads(2)
try:
    check_products(torch.bfloat16)
except ConfigError:
    print("noticed")
else:
    print(torch.nn.functional.linear(torch.ones(5, 576).bfloat16(), torch.ones(1536, 576).bfloat16()).unique().tolist())
"""
    answer = subprocess.run(
        [sys.executable, "-c", code], env=env.for_child(OMP_DYNAMIC="TRUE"), capture_output=True, text=True, check=True
    )
    assert answer.stdout.strip() in ("noticed", "[576.0]")
