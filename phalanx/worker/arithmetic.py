"""Whether PyTorch computes rightly on this machine, as it is set up.

Settings that give a parallel region fewer threads than were asked for (`OMP_DYNAMIC`, `OMP_THREAD_LIMIT`,
`OMP_MAX_ACTIVE_LEVELS`) make the bfloat16 products of its CPU library leave out parts of the result, without an error.
Answers would be rubbish; so one product is compared with the same one in float64 before a model is loaded.
"""

from __future__ import annotations

import torch

from phalanx.errors import ConfigError

_ROWS, _INNER, _OUTER = 5, 576, 1536


def check_products(dtype: torch.dtype) -> None:
    """Raises ConfigError when a product in `dtype` on the CPU is wrong. Takes about a millisecond."""
    generator = torch.Generator().manual_seed(0)
    left = torch.rand(_ROWS, _INNER, generator=generator).to(dtype)
    right = torch.rand(_OUTER, _INNER, generator=generator).to(dtype)
    wanted = left.double() @ right.double().T
    found = torch.nn.functional.linear(left, right).double()
    if not bool(((found - wanted).abs() <= 0.02 * wanted).all()):  # not a number is not below either
        raise ConfigError(
            f"PyTorch computes wrong {str(dtype).removeprefix('torch.')} products here, with "
            f"{torch.get_num_threads()} threads.",
            fix="Unset OMP_DYNAMIC, OMP_THREAD_LIMIT and OMP_MAX_ACTIVE_LEVELS, or set OMP_NUM_THREADS=1.",
        )
