"""Small operations between the products: norms with their residual."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from phalanx.kernels.library import native

_TYPES = {torch.float32: 0, torch.bfloat16: 1}


def add_rms_norm(x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """RMS norm (arXiv 1910.07467) over the last axis of `x` [T, width], after `x += delta` in place.

    float32 or bfloat16, computed in float32; `weight` [width] has the type of `x`. A row's result depends on no other.
    """
    library = native()
    if library is None or x.device.type != "cpu" or x.dtype not in _TYPES:
        return add_rms_norm_twin(x, delta, weight, eps)
    if not (x.is_contiguous() and (delta is None or (delta.is_contiguous() and delta.shape == x.shape))):
        raise ValueError("x and delta have to be contiguous and of one shape")
    y = torch.empty_like(x)
    library.rms_norm(
        x.data_ptr(), 0 if delta is None else delta.data_ptr(), 0 if weight is None else weight.data_ptr(),
        y.data_ptr(), x.shape[0], x.shape[1], eps, _TYPES[x.dtype],
    )  # fmt: skip
    return y


def add_rms_norm_twin(
    x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor | None, eps: float
) -> torch.Tensor:
    if delta is not None:
        x += delta
    return F.rms_norm(x, x.shape[-1:], weight, eps)
