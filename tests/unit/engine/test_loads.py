"""Who has least, against a plain search; and that it does not take longer the more engines there are."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.engine.loads import Loads

changes = st.lists(
    st.tuples(st.integers(0, 7), st.one_of(st.none(), st.integers(0, 5)), st.booleans()), min_size=1, max_size=200
)


@given(changes)
def test_the_lowest_and_of_equal_ones_the_longest_so(script) -> None:
    loads, model, since = Loads(8), [None] * 8, [0] * 8
    for step, (number, load, ask) in enumerate(script, start=1):
        loads.set(number, load)
        if model[number] != load:
            model[number], since[number] = load, step
        able = [n for n in range(8) if model[n] is not None]
        assert list(loads) == model
        assert loads.able == len(able)
        if ask and able:
            least = loads.least()
            assert model[least] == min(model[n] for n in able)
    if able:
        ties = [n for n in able if model[n] == min(model[m] for m in able)]
        fresh = Loads(8)
        for n in sorted(able, key=lambda n: since[n]):
            fresh.set(n, model[n])
        assert fresh.least() == min(ties, key=lambda n: since[n])
    assert len(loads._heap) <= 4 * 8 + 64 + 8


def test_idle_ones_each_in_turn() -> None:
    loads, chosen = Loads.of([0.0] * 5), []
    for _ in range(10):
        number = loads.least()
        chosen.append(number)
        loads.set(number, 7.0)
        loads.least()
        loads.set(number, 0.0)
    assert chosen == [0, 1, 2, 3, 4] * 2


def test_nobody_can() -> None:
    loads = Loads.of([None, 3.0])
    assert loads.least() == 1
    loads.set(1, None)
    with pytest.raises(LookupError):
        loads.least()


def test_thousands_cost_little_more_than_a_few() -> None:
    def seconds(count: int) -> float:
        loads = Loads.of([float(number) for number in range(count)])
        loads.least()
        begin = time.process_time()
        for step in range(3000):
            number = loads.least()
            loads.set(number, float(count + step))
        return time.process_time() - begin

    assert min(seconds(4096) for _ in range(3)) < 4 * min(seconds(16) for _ in range(3))
