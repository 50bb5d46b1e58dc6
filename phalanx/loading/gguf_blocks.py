"""GGUF block formats as float32 values, in plain PyTorch.

A block is a run of 32 or 256 neighbouring elements of a row, stored as small integers with shared float16 scales. The
layouts and formulas are ggml's (https://github.com/ggml-org/ggml, ggml-quants.c); products and sums are taken one by
one in float32, as ggml's reference does, so that the values are equal to the last bit. Quantising is not covered.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.errors import FormatError, UnsupportedModel

# Blocks are worked on in pieces of about this many elements, which stay in a core's cache.
_PIECE = 1 << 17


@dataclass(frozen=True)
class BlockFormat:
    """`unpack(blocks, out)` fills float32 `out` [n, elements] from uint8 `blocks` [n, nbytes]."""

    elements: int
    nbytes: int
    unpack: Callable[[Tensor, Tensor], None]


def dequantize(
    raw: Tensor, dtype: str, shape: tuple[int, ...], out: Tensor | None = None, *, target: torch.dtype = torch.float32
) -> Tensor:
    """The values of `raw` (uint8 [bytes]) as a tensor of `shape` and the type `target`, rounded from float32.

    `dtype` is a block format or F32, F16, BF16. With `out` (any floating type, contiguous) the result goes there. No
    float32 copy of the whole is made unless it is what was asked for. Raises UnsupportedModel for another `dtype`, and
    FormatError when the bytes do not fit the shape.
    """
    count = math.prod(shape)
    if out is None:
        out = torch.empty(shape, dtype=target)
    if dtype in _PLAIN:
        if raw.numel() != count * _PLAIN[dtype].itemsize:
            raise FormatError(f"{raw.numel()} bytes are not {count} values of the type {dtype}.")
        if raw.storage_offset() % _PLAIN[dtype].itemsize or raw.data_ptr() % _PLAIN[dtype].itemsize:
            raw = raw.clone()
        return out.copy_(raw.view(_PLAIN[dtype]).view(shape))
    block = FORMATS.get(dtype)
    if block is None:
        raise UnsupportedModel(
            f"Tensors of the type {dtype} are not supported.",
            fix=f"Supported: {', '.join((*_PLAIN, *FORMATS))}.",
        )
    if count % block.elements or raw.numel() != count // block.elements * block.nbytes:
        raise FormatError(f"{raw.numel()} bytes are not {count} values of the type {dtype}.")
    blocks, values = raw.view(-1, block.nbytes), out.view(-1, block.elements)
    step = max(1, _PIECE // block.elements)
    buffer = None if out.dtype == torch.float32 else torch.empty(min(step, len(blocks)), block.elements)
    for start in range(0, len(blocks), step):
        piece, into = blocks[start : start + step], values[start : start + step]
        if buffer is None:
            block.unpack(piece, into)
        else:
            block.unpack(piece, buffer[: len(piece)])
            into.copy_(buffer[: len(piece)])
    return out


_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def _half(blocks: Tensor, at: int) -> Tensor:
    """The float16 at byte `at` of each block, as float32 [n, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor, out: Tensor) -> None:
    """Low halves of the bytes `packed` [..., k] to out[..., 0, :], high halves to out[..., 1, :]."""
    out[..., 0, :] = packed & 15
    out[..., 1, :] = packed >> 4


def _fifth_bits(blocks: Tensor, at: int) -> Tensor:
    """The 32 bits at byte `at` of each block, lowest first, as 0 or 16: uint8 [n, 32]."""
    packed = blocks[:, at : at + 4].unsqueeze(-1)
    return ((packed >> _BITS) & 1).reshape(-1, 32) << 4


_BITS = torch.arange(8, dtype=torch.uint8)


def _q4_0(blocks: Tensor, out: Tensor) -> None:
    """scale f16, 16 bytes of nibbles: scale · (q - 8)."""
    _nibbles(blocks[:, 2:], out.view(-1, 2, 16))
    out.sub_(8).mul_(_half(blocks, 0))


def _q4_1(blocks: Tensor, out: Tensor) -> None:
    """scale f16, minimum f16, 16 bytes of nibbles: scale · q + minimum."""
    _nibbles(blocks[:, 4:], out.view(-1, 2, 16))
    out.mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q5_0(blocks: Tensor, out: Tensor) -> None:
    """scale f16, 4 bytes of fifth bits, 16 bytes of nibbles: scale · (q - 16)."""
    _nibbles(blocks[:, 6:], out.view(-1, 2, 16))
    out.add_(_fifth_bits(blocks, 2)).sub_(16).mul_(_half(blocks, 0))


def _q5_1(blocks: Tensor, out: Tensor) -> None:
    """scale f16, minimum f16, 4 bytes of fifth bits, 16 bytes of nibbles: scale · q + minimum."""
    _nibbles(blocks[:, 8:], out.view(-1, 2, 16))
    out.add_(_fifth_bits(blocks, 4)).mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q8_0(blocks: Tensor, out: Tensor) -> None:
    """scale f16, 32 signed bytes: scale · q."""
    out.copy_(blocks[:, 2:].view(torch.int8)).mul_(_half(blocks, 0))


def _scales_and_minima(packed: Tensor) -> tuple[Tensor, Tensor]:
    """The eight 6-bit scales and eight 6-bit minima in 12 bytes, as uint8 [n, 8] each.

    Bytes 0-3 hold the low scales and 4-7 the low minima, each with two high bits of a later one on top; bytes 8-11
    hold the other scales' and minima's low four bits."""
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = torch.cat((first & 63, (third & 15) | ((first >> 2) & 48)), dim=1)
    minima = torch.cat((second & 63, (third >> 4) | ((second >> 2) & 48)), dim=1)
    return scales, minima


def _scale_k(blocks: Tensor, out: Tensor) -> None:
    """out [n, 8, 32] from integers to scale · q - minimum, for Q4_K and Q5_K."""
    scales, minima = _scales_and_minima(blocks[:, 4:16])
    scale = (_half(blocks, 0) * scales).unsqueeze(-1)
    minimum = (_half(blocks, 2) * minima).unsqueeze(-1)
    out.mul_(scale).sub_(minimum)


def _q4_k(blocks: Tensor, out: Tensor) -> None:
    """scale f16, minimum f16, 12 bytes of 6-bit scales and minima, 128 bytes of nibbles."""
    _nibbles(blocks[:, 16:].view(-1, 4, 32), out.view(-1, 4, 2, 32))
    _scale_k(blocks, out.view(-1, 8, 32))


def _q5_k(blocks: Tensor, out: Tensor) -> None:
    """As Q4_K, with 32 bytes of fifth bits before the nibbles; bit k of byte i belongs to element 32·k + i."""
    _nibbles(blocks[:, 48:].view(-1, 4, 32), out.view(-1, 4, 2, 32))
    fifth = ((blocks[:, 16:48].unsqueeze(1) >> _BITS.view(8, 1)) & 1) << 4
    out.view(-1, 8, 32).add_(fifth)
    _scale_k(blocks, out.view(-1, 8, 32))


def _q6_k(blocks: Tensor, out: Tensor) -> None:
    """128 bytes of low nibbles, 64 bytes of high bit pairs, 16 signed scales, scale f16: scale · s · (q - 32)."""
    _nibbles(blocks[:, :128].view(-1, 2, 64), out.view(-1, 2, 2, 64))
    high = ((blocks[:, 128:192].view(-1, 2, 1, 32) >> (2 * _BITS[:4]).view(4, 1)) & 3) << 4
    out.view(-1, 2, 4, 32).add_(high)
    scale = _half(blocks, 208) * blocks[:, 192:208].view(torch.int8)
    out.view(-1, 16, 16).sub_(32).mul_(scale.unsqueeze(-1))


FORMATS: dict[str, BlockFormat] = {
    "Q4_0": BlockFormat(32, 18, _q4_0),
    "Q4_1": BlockFormat(32, 20, _q4_1),
    "Q5_0": BlockFormat(32, 22, _q5_0),
    "Q5_1": BlockFormat(32, 24, _q5_1),
    "Q8_0": BlockFormat(32, 34, _q8_0),
    "Q4_K": BlockFormat(256, 144, _q4_k),
    "Q5_K": BlockFormat(256, 176, _q5_k),
    "Q6_K": BlockFormat(256, 210, _q6_k),
}
