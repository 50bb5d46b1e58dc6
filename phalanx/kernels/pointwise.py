"""Small operations between the products: norms with their residual, activations, rotary angles.

float32 or bfloat16, computed in float32 and rounded once. A row's result depends on no other row.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from phalanx.kernels.library import native

_TYPES = {torch.float32: 0, torch.bfloat16: 1}
NORM_TYPES = {
    (torch.float32, torch.float32): 0, (torch.bfloat16, torch.bfloat16): 1, (torch.bfloat16, torch.float32): 2,
}  # fmt: skip
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3}


def add_norm(
    x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float,
    layer: bool,
) -> torch.Tensor:  # fmt: skip
    """RMS norm (arXiv 1910.07467), or layer norm (arXiv 1607.06450), over the last axis of `x` [T, width], after
    `x += delta` in place.

    `weight` and `bias` [width] have the type of `x`, or are float32; a bias comes with a weight.
    """
    library = native()
    types = NORM_TYPES.get((x.dtype, x.dtype if weight is None else weight.dtype))
    if library is None or types is None or not x.is_cpu:
        return add_norm_twin(x, delta, weight, bias, eps, layer)
    rows, width = x.shape
    if (
        not x.is_contiguous()
        or (delta is not None and not (delta.is_contiguous() and delta.shape == x.shape and delta.dtype is x.dtype))
        or (weight is not None and not (weight.is_contiguous() and weight.numel() == width))
        or (bias is not None and not (bias.is_contiguous() and bias.numel() == width and bias.dtype is weight.dtype))  # type: ignore[union-attr]
    ):
        raise ValueError("a norm's tensors have to be contiguous, and of shapes and types that fit")
    y = torch.empty_like(x)
    library.norm(
        x.data_ptr(), 0 if delta is None else delta.data_ptr(), 0 if weight is None else weight.data_ptr(),
        0 if bias is None else bias.data_ptr(), y.data_ptr(), rows, width, eps, layer, types,
    )  # fmt: skip
    return y


def add_norm_twin(
    x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float,
    layer: bool,
) -> torch.Tensor:  # fmt: skip
    if delta is not None:
        x += delta
    wide = x if weight is None else x.to(weight.dtype)
    if layer:
        return F.layer_norm(wide, x.shape[-1:], weight, bias, eps).to(x.dtype)
    return F.rms_norm(wide, x.shape[-1:], weight, eps).to(x.dtype)


def activate(name: str, x: torch.Tensor) -> torch.Tensor:
    """The activation of `x` [T, width]. Raises ValueError for a name we do not have."""
    library, function = native(), ACTIVATIONS.get(name)
    if library is None or function is None or not x.is_cpu or x.dtype not in _TYPES:
        return activate_twin(name, x)
    if not x.is_contiguous():
        raise ValueError("what is activated has to be contiguous")
    y = torch.empty_like(x)
    library.activate(x.data_ptr(), y.data_ptr(), x.shape[0], x.shape[1], function, _TYPES[x.dtype])
    return y


def activate_twin(name: str, x: torch.Tensor) -> torch.Tensor:
    match name:
        case "silu":
            return F.silu(x)
        case "gelu":
            return F.gelu(x)
        case "gelu_tanh":
            return F.gelu(x, approximate="tanh")
        case "relu":
            return F.relu(x)
    raise ValueError(f"no activation '{name}'")


def activate_gated(name: str, both: torch.Tensor) -> torch.Tensor:
    """activation(gate) * up (arXiv 2002.05202), [T, width], where `both` [T, 2 · width] holds gate and up side by side.
    Raises ValueError for a name we do not have."""
    library, function = native(), ACTIVATIONS.get(name)
    if library is None or function is None or not both.is_cpu or both.dtype not in _TYPES:
        return activate_gated_twin(name, both)
    rows, columns = both.shape
    if not both.is_contiguous() or columns % 2:
        raise ValueError("gate and up have to be contiguous and equally wide")
    y = torch.empty(rows, columns // 2, dtype=both.dtype)
    library.activate_gated(both.data_ptr(), y.data_ptr(), rows, columns // 2, function, _TYPES[both.dtype])
    return y


def activate_gated_twin(name: str, both: torch.Tensor) -> torch.Tensor:
    width = both.shape[1] // 2
    return activate_twin(name, both[:, :width]).mul_(both[:, width:])


def turns(
    positions: torch.Tensor, inverse_frequencies: torch.Tensor, factors: torch.Tensor, classes: torch.Tensor | None,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """cos and signed sin, [T, 1, dim] each, of the rotary angles (arXiv 2104.09864) of tokens at `positions` int64 [T],
    which are below 2^20: position times frequency in float32, both halves alike, the sin of the first half negated.

    `inverse_frequencies` float32 [classes, dim / 2] and `factors` float32 [classes], which multiply both, are those of
    each token's class, `classes` int64 [T]; None: all 0.
    """
    library = native()
    if library is None or not positions.is_cpu or dtype not in _TYPES:
        return turns_twin(positions, inverse_frequencies, factors, classes, dtype)
    tokens, half = len(positions), inverse_frequencies.shape[1]
    if not (
        positions.is_contiguous()
        and positions.dtype is torch.int64
        and inverse_frequencies.is_contiguous()
        and inverse_frequencies.dtype is factors.dtype is torch.float32
        and factors.is_contiguous()
        and factors.shape == inverse_frequencies.shape[:1]
        and (classes is None or (classes.is_contiguous() and classes.dtype is torch.int64))
        and (classes is None or classes.shape == positions.shape)
        and (classes is None or not tokens or 0 <= int(classes.min()) <= int(classes.max()) < len(factors))
    ):
        raise ValueError("the tensors of rotary angles have to be contiguous, and of shapes and types that fit")
    cos = torch.empty(tokens, 1, 2 * half, dtype=dtype)
    sin = torch.empty_like(cos)
    library.turns(
        positions.data_ptr(), inverse_frequencies.data_ptr(), factors.data_ptr(),
        0 if classes is None else classes.data_ptr(), cos.data_ptr(), sin.data_ptr(), tokens, half, _TYPES[dtype],
    )  # fmt: skip
    return cos, sin


def turns_twin(
    positions: torch.Tensor, inverse_frequencies: torch.Tensor, factors: torch.Tensor, classes: torch.Tensor | None,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    if classes is None:
        angles, factor = torch.outer(positions.float(), inverse_frequencies[0]), factors[:1, None]
    else:
        angles, factor = positions.float()[:, None] * inverse_frequencies[classes], factors[classes, None]
    cos, sin = angles.cos() * factor, angles.sin() * factor
    return torch.cat((cos, cos), -1).to(dtype)[:, None], torch.cat((-sin, sin), -1).to(dtype)[:, None]
