"""Where a request's memory comes from: the KV cache as numbered blocks, shared by equal beginnings.

A block is in exactly one of three states:

    used        refs > 0    in the table of one request, or of several that begin alike
    free        refs = 0    content worthless; handed out first
    free cached refs = 0    content still valid and found by its hash; handed out last, least recently freed first

Guarantees: a block is shared only between requests whose tokens and salt are equal up to its end; a hash finds a block
only once its content has really been computed (`publish`); an operation that cannot be done in full changes nothing.

Covers bookkeeping only: numbers, no tensors. Who gets blocks, and when, is the scheduler's business.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

_ITEM_BYTES = 4


def extend_hashes(hashes: list[bytes], tokens: Sequence[int], block_size: int, salt: str) -> None:
    """Append the hashes of the full blocks of `tokens` that `hashes` does not have yet.

    A block's hash covers its tokens, the hash of the block before it, and so everything before it; the first one
    follows the salt. It is BLAKE2b (RFC 7693) with 256 bits: no client can find two prefixes that collide.
    """
    known = len(hashes)
    full = len(tokens) // block_size
    if full <= known:
        return
    parent = hashes[-1] if hashes else blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=32).digest()
    data = array("i", tokens[known * block_size : full * block_size]).tobytes()
    stride = block_size * _ITEM_BYTES
    for start in range(0, len(data), stride):
        parent = blake2b(parent + data[start : start + stride], digest_size=32).digest()
        hashes.append(parent)


class BlockPool:
    """All blocks of one KV cache. A table is a plain list of block numbers that its request owns."""

    def __init__(self, blocks: int, block_size: int, *, caching: bool = True) -> None:
        self.blocks = blocks
        self.block_size = block_size
        self.caching = caching
        self.reset()

    def reset(self) -> None:
        """Forget every table and every cached block."""
        self._refs = [0] * self.blocks
        self._hashes: list[bytes | None] = [None] * self.blocks
        self._cached: dict[bytes, int] = {}
        self._expected: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(self.blocks))

    @property
    def num_free(self) -> int:
        """Blocks that no request uses, cached or not."""
        return len(self._free)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens."""
        return -(-tokens // self.block_size)

    # Tables

    def allocate(self, cached: Sequence[int], tokens: int, spare: int = 0) -> list[int] | None:
        """A new table that begins with the `cached` blocks and holds `tokens` tokens.

        None when that would leave fewer than `spare` blocks free.
        """
        revived = sum(self._refs[block] == 0 for block in cached)
        fresh = self.blocks_for(tokens) - len(cached)
        if fresh + revived + spare > len(self._free):
            return None
        for block in cached:
            self._refs[block] += 1
            self._free.pop(block, None)
        return [*cached, *(self._take() for _ in range(fresh))]

    def append(self, table: list[int], tokens: int) -> list[int] | None:
        """Lengthen `table` until it holds `tokens` tokens. Returns the new blocks, or None when too few are free."""
        missing = self.blocks_for(tokens) - len(table)
        if missing > len(self._free):
            return None
        fresh = [self._take() for _ in range(missing)]
        table += fresh
        return fresh

    def free(self, table: list[int]) -> None:
        """Give back every block of `table` and empty it. Its end is evicted before its beginning, which more
        requests are likely to share."""
        for block in reversed(table):
            self._refs[block] -= 1
            if self._refs[block]:
                continue
            found_by = self._hashes[block]
            if found_by is not None and self._expected.get(found_by) == block:
                self._forget(block)  # it was never computed
            self._free[block] = None
            if self._hashes[block] is None:
                self._free.move_to_end(block, last=False)
        table.clear()

    def _take(self) -> int:
        block, _ = self._free.popitem(last=False)
        if self._hashes[block] is not None:
            self._forget(block)
        self._refs[block] = 1
        return block

    # The prefix index

    def lookup(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks of the longest cached beginning of `hashes`. Changes nothing."""
        found = []
        for wanted in hashes:
            block = self._cached.get(wanted)
            if block is None:
                break
            found.append(block)
        return found

    def expect(self, block: int, block_hash: bytes) -> None:
        """`block` is going to hold the content of `block_hash`: whoever needs it too had better wait.

        The expectation ends with `publish`, or when the block is freed before.
        """
        if self.caching and block_hash not in self._cached and block_hash not in self._expected:
            self._expected[block_hash] = block
            self._hashes[block] = block_hash

    def is_expected(self, block_hash: bytes) -> bool:
        return block_hash in self._expected

    def publish(self, block: int, block_hash: bytes) -> None:
        """`block` now holds the content of `block_hash`. When another block already does, this one stays private."""
        if not self.caching or block_hash in self._cached:
            return
        other = self._expected.pop(block_hash, block)
        self._hashes[other] = None
        self._cached[block_hash] = block
        self._hashes[block] = block_hash

    def retract(self, blocks: Sequence[int]) -> None:
        """The content of these blocks, all in use, is in doubt: nobody shall find it any more."""
        for block in blocks:
            self._forget(block)

    def _forget(self, block: int) -> None:
        """Take `block` out of the index."""
        found_by = self._hashes[block]
        if found_by is None:
            return
        self._hashes[block] = None
        for index in (self._cached, self._expected):
            if index.get(found_by) == block:
                del index[found_by]

    # Self-examination

    def check_invariants(self, tables: Sequence[Sequence[int]] | None = None) -> None:
        """Raise RuntimeError when the books do not balance; with `tables`, also against all tables in use."""
        faults = []
        if [block for block, refs in enumerate(self._refs) if refs == 0] != sorted(self._free):
            faults.append("the free blocks are not the unused ones")
        if min(self._refs, default=0) < 0:
            faults.append("a block was freed twice")
        for index, name in ((self._cached, "cached"), (self._expected, "expected")):
            if any(self._hashes[block] != found_by for found_by, block in index.items()):
                faults.append(f"the index of {name} blocks points at a block with another hash")
        if len(self._cached) + len(self._expected) != sum(h is not None for h in self._hashes):
            faults.append("a block has a hash that does not find it")
        if any(self._refs[block] == 0 for block in self._expected.values()):
            faults.append("a block is expected that nobody computes")
        worthless = [self._hashes[block] is None for block in self._free]
        if worthless != sorted(worthless, reverse=True):
            faults.append("a cached block would be evicted before a worthless one")
        if tables is not None:
            counted = [0] * self.blocks
            for table in tables:
                for block in table:
                    counted[block] += 1
            if counted != self._refs:
                faults.append("the reference counts are not the tables in use")
        if faults:
            raise RuntimeError(f"The block pool is inconsistent: {'; '.join(faults)}.")
