"""The block pool against a naive model that remembers everything by content."""

from __future__ import annotations

import hashlib
import random
import struct
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from phalanx.engine.kv_blocks import BlockPool, extend_hashes

SIZE = 2
BLOCKS = 10
Content = tuple[str, tuple[int, ...]]
"""Salt and every token up to a block's end: what a block's hash stands for."""


def hashes_of(tokens: list[int], salt: str = "") -> list[bytes]:
    hashes: list[bytes] = []
    extend_hashes(hashes, tokens, SIZE, salt)
    return hashes


@dataclass
class Table:
    tokens: list[int]
    salt: str
    blocks: list[int]
    computed: int
    """Full blocks that were published."""
    expected: bool = False

    def content(self, index: int) -> Content:
        return self.salt, tuple(self.tokens[: (index + 1) * SIZE])


@dataclass
class Model:
    """What the pool must do, said in the simplest way: free blocks are a list, the next to go in front."""

    free: list[int] = field(default_factory=lambda: list(range(BLOCKS)))
    cached: dict[Content, int] = field(default_factory=dict)
    tables: list[Table] = field(default_factory=list)

    def lookup(self, tokens: list[int], salt: str) -> list[int]:
        found: list[int] = []
        for end in range(SIZE, len(tokens) + 1, SIZE):
            block = self.cached.get((salt, tuple(tokens[:end])))
            if block is None:
                break
            found.append(block)
        return found

    def take(self, count: int) -> list[int]:
        taken, self.free = self.free[:count], self.free[count:]
        self.cached = {content: block for content, block in self.cached.items() if block not in taken}
        return taken

    def give(self, table: Table) -> None:
        self.tables.remove(table)
        used = {block for other in self.tables for block in other.blocks}
        for block in reversed(table.blocks):
            if block not in used:
                if block in self.cached.values():
                    self.free.append(block)
                else:
                    self.free.insert(0, block)


class Bench:
    """The pool and its model side by side; each operation is done to both and compared."""

    def __init__(self) -> None:
        self.pool = BlockPool(BLOCKS, SIZE)
        self.model = Model()

    def allocate(self, tokens: list[int], salt: str, spare: int) -> None:
        hashes = hashes_of(tokens, salt)
        cached = self.pool.lookup(hashes[: (len(tokens) - 1) // SIZE])
        assert cached == self.model.lookup(tokens, salt)[: (len(tokens) - 1) // SIZE]
        free = [block for block in self.model.free if block not in cached]
        fresh = -(-len(tokens) // SIZE) - len(cached)
        blocks = self.pool.allocate(cached, len(tokens), spare)
        if fresh + spare > len(free):
            assert blocks is None
            return
        self.model.free = free
        assert blocks == cached + self.model.take(fresh)
        self.model.tables.append(Table(tokens, salt, blocks, len(cached)))

    def expect(self, table: Table) -> None:
        table.expected = True
        for block, block_hash in zip(table.blocks, hashes_of(table.tokens, table.salt), strict=False):
            if block not in self.model.cached.values():
                self.pool.expect(block, block_hash)

    def publish(self, table: Table) -> None:
        """Its next block is computed."""
        index = table.computed
        if (index + 1) * SIZE <= min(len(table.tokens), len(table.blocks) * SIZE):
            self.pool.publish(table.blocks[index], hashes_of(table.tokens, table.salt)[index])
            self.model.cached.setdefault(table.content(index), table.blocks[index])
            table.computed += 1

    def append(self, table: Table, tokens: list[int]) -> None:
        wanted = -(-(len(table.tokens) + len(tokens)) // SIZE) - len(table.blocks)
        before = list(table.blocks)
        fresh = self.pool.append(table.blocks, len(table.tokens) + len(tokens))
        if wanted > len(self.model.free):
            assert fresh is None
            assert table.blocks == before
        else:
            assert fresh == self.model.take(max(wanted, 0))
            assert table.blocks == before + fresh
            table.tokens = table.tokens + tokens

    def free(self, table: Table) -> None:
        blocks = list(table.blocks)
        self.pool.free(blocks)
        assert blocks == []
        self.model.give(table)

    def reset(self) -> None:
        self.pool.reset()
        self.model = Model()

    def check(self) -> None:
        self.pool.check_invariants([table.blocks for table in self.model.tables])
        assert list(self.pool._free) == self.model.free
        for (salt, tokens), block in self.model.cached.items():
            assert self.pool.lookup(hashes_of(list(tokens), salt)[-1:]) == [block]
        assert len(self.pool._cached) == len(self.model.cached)
        promised = {t.content(index) for t in self.model.tables if t.expected for index in range(len(t.tokens) // SIZE)}
        expected = {hashes_of(list(tokens), salt)[-1] for salt, tokens in promised}
        assert set(self.pool._expected) <= expected, "whoever waits, waits for something that is being computed"


tokens_of = st.lists(st.integers(0, 1), min_size=1, max_size=9)


class BlockPoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench()

    def pick(self, number: int) -> Table | None:
        tables = self.bench.model.tables
        return tables[number % len(tables)] if tables else None

    @rule(tokens=tokens_of, salt=st.sampled_from(["", "a"]), spare=st.integers(0, 2), expected=st.booleans())
    def allocate(self, tokens: list[int], salt: str, spare: int, expected: bool) -> None:
        count = len(self.bench.model.tables)
        self.bench.allocate(tokens, salt, spare)
        if expected and len(self.bench.model.tables) > count:
            self.bench.expect(self.bench.model.tables[-1])

    @rule(number=st.integers(0, 9))
    def publish(self, number: int) -> None:
        if table := self.pick(number):
            self.bench.publish(table)

    @rule(number=st.integers(0, 9), tokens=tokens_of)
    def append(self, number: int, tokens: list[int]) -> None:
        if table := self.pick(number):
            self.bench.append(table, tokens)

    @rule(number=st.integers(0, 9))
    def free(self, number: int) -> None:
        if table := self.pick(number):
            self.bench.free(table)

    @rule(really=st.integers(0, 19))
    def reset(self, really: int) -> None:
        if really == 0:
            self.bench.reset()

    @invariant()
    def consistent(self) -> None:
        self.bench.check()


def test_pool_machine() -> None:
    profile = settings(max_examples=60, stateful_step_count=50, derandomize=True)
    run_state_machine_as_test(BlockPoolMachine, settings=profile)


def test_thirty_thousand_random_operations() -> None:
    rng = random.Random(0)
    bench = Bench()
    for _ in range(30_000):
        table = rng.choice(bench.model.tables) if bench.model.tables else None
        choice = rng.random()
        if table is None or choice < 0.3:
            count = len(bench.model.tables)
            tokens = [rng.randrange(2) for _ in range(rng.randint(1, 9))]
            bench.allocate(tokens, rng.choice(["", "a"]), rng.choice([0, 0, 1]))
            if rng.random() < 0.5 and len(bench.model.tables) > count:
                bench.expect(bench.model.tables[-1])
        elif choice < 0.6:
            bench.publish(table)
        elif choice < 0.75:
            bench.append(table, [rng.randrange(2) for _ in range(rng.randint(1, 3))])
        elif choice < 0.999:
            bench.free(table)
        else:
            bench.reset()
        bench.check()


def published(pool: BlockPool, tokens: list[int], salt: str = "") -> list[int]:
    """A table whose full blocks are all findable."""
    table = pool.allocate([], len(tokens))
    assert table is not None
    for block, block_hash in zip(table, hashes_of(tokens, salt), strict=False):
        pool.publish(block, block_hash)
    return table


def test_hashes_are_equal_exactly_for_equal_beginnings_and_salts() -> None:
    assert hashes_of([1, 2, 3, 4, 5])[:2] == hashes_of([1, 2, 3, 4])
    assert hashes_of([1, 2, 3, 4])[0] == hashes_of([1, 2, 9, 4])[0]
    assert hashes_of([1, 2, 3, 4])[1] != hashes_of([9, 2, 3, 4])[1]  # the same tokens after others
    assert not set(hashes_of([1, 2, 3, 4], "a")) & set(hashes_of([1, 2, 3, 4], "b"))


def test_hashes_do_not_depend_on_how_they_were_extended() -> None:
    tokens, at_once, piecewise = list(range(20)), hashes_of(list(range(20))), []
    for end in range(len(tokens) + 1):
        extend_hashes(piecewise, tokens[:end], SIZE, "")
    assert piecewise == at_once


def test_hashes_are_as_documented() -> None:
    root = hashlib.blake2b(b"salt", digest_size=32).digest()
    assert hashes_of([1, 2], "salt") == [hashlib.blake2b(root + struct.pack("<2i", 1, 2), digest_size=32).digest()]


def test_the_end_of_a_freed_table_is_evicted_before_its_beginning() -> None:
    pool = BlockPool(3, SIZE)
    table = published(pool, [1, 2, 3, 4, 5, 6])
    beginning = list(table)
    pool.free(table)
    assert pool.allocate([], 1) == [beginning[2]]
    assert pool.lookup(hashes_of([1, 2, 3, 4, 5, 6])) == beginning[:2]


def test_using_a_cached_block_again_saves_it_from_eviction() -> None:
    pool = BlockPool(2, SIZE)
    for tokens in ([1, 1], [2, 2]):
        pool.free(published(pool, tokens))
    again = pool.allocate(pool.lookup(hashes_of([1, 1])), 2)
    assert again is not None
    pool.free(again)
    pool.allocate([], 1)
    assert pool.lookup(hashes_of([1, 1]))
    assert not pool.lookup(hashes_of([2, 2]))


def test_an_expectation_ends_when_its_block_is_freed() -> None:
    pool = BlockPool(2, SIZE)
    table = pool.allocate([], 2)
    assert table is not None
    wanted = hashes_of([1, 2])[0]
    pool.expect(table[0], wanted)
    assert pool.is_expected(wanted)
    assert pool.lookup([wanted]) == []
    pool.free(table)
    assert not pool.is_expected(wanted)


def test_another_block_may_fulfil_an_expectation() -> None:
    pool = BlockPool(2, SIZE)
    first, second = pool.allocate([], 2), pool.allocate([], 2)
    assert first is not None
    assert second is not None
    wanted = hashes_of([1, 2])[0]
    pool.expect(first[0], wanted)
    pool.publish(second[0], wanted)
    assert not pool.is_expected(wanted)
    pool.publish(first[0], wanted)
    assert pool.lookup([wanted]) == second
    pool.check_invariants([first, second])


def test_without_caching_nothing_is_found() -> None:
    pool = BlockPool(2, SIZE, caching=False)
    published(pool, [1, 2])
    assert pool.lookup(hashes_of([1, 2])) == []


def test_a_double_free_is_found_out() -> None:
    pool = BlockPool(2, SIZE)
    table = pool.allocate([], 2)
    assert table is not None
    copy = list(table)
    pool.free(table)
    pool.free(copy)
    with pytest.raises(RuntimeError, match="freed twice"):
        pool.check_invariants()


def test_a_leaked_block_is_found_out() -> None:
    pool = BlockPool(2, SIZE)
    pool.allocate([], 2)
    with pytest.raises(RuntimeError, match="tables in use"):
        pool.check_invariants([])
