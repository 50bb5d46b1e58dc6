"""Where a round of a shared-memory group takes place, in numbers, for native code that takes part in one by itself.

What the words mean is described in `transports.shared_memory`; native/exchange.hpp reads and writes them.
"""

from __future__ import annotations

from typing import NamedTuple


class Rounds(NamedTuple):
    """Addresses are good until the group is closed."""

    rank: int
    size: int
    words: int
    """Address of the flags."""
    round_number: int
    """Address of the number of the last round, which whoever begins a round counts up."""
    line: int
    """Words from one rank's flags to the next one's."""
    sleeping: tuple[int, ...]
    """Of each rank, the word that is not 0 while it sleeps."""
    bells: tuple[int, ...]
    """Of each rank, the eventfd that wakes it."""
    slots: int
    """Address of the slots: of all ranks for even rounds, then for odd ones."""
    slot_bytes: int
    most_bytes: int
    """Of all ranks together: more takes other rounds than one in which each rank adds up everything."""
    piece_rows: int
    """More rows than these are then summed so many at a time, or as many as a slot holds, each in one such round."""
    sums: int
    """What a rank says it does in a sum of a dtype, less the bytes."""
    gathers: int
    """What a rank says it does in a gather of vectors of int32, as long from each rank, less the bytes of all."""
    spins: bool
    """Whether each rank has a core to wait on."""
