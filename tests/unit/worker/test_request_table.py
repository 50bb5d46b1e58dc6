"""The request table: what plans do to it, what a step reads from it, and what can never be read from it."""

import numpy as np
import pytest

from phalanx.kernels import request_rows as kernels
from phalanx.step import NO_TOKEN, ON_DEVICE, Rows, SamplingState, StepPlan, pack
from phalanx.worker.request_table import RequestTable
from tests.helpers.plans import GREEDY, Run, admission, plan


@pytest.fixture(autouse=True, params=["native", "twins"])
def served_by(request, monkeypatch):
    if request.param == "twins":
        monkeypatch.setattr(kernels, "native", lambda: None)
    elif kernels.native() is None:
        pytest.skip("the native library was not built")


def table(slots: int = 8, max_model_len: int = 64, blocks: int = 40) -> RequestTable:
    return RequestTable(slots=slots, max_model_len=max_model_len, block_size=4, blocks=blocks, vocab_size=100)


def step(at: RequestTable, *runs: Run, **rest):
    """Apply, gather and commit, as a runner does. Returns rows and inputs."""
    rows = at.apply(plan(runs, **rest))
    inputs = at.gather(rows) if len(rows.slots) else None
    at.commit(rows)
    return rows, inputs


def test_inputs_of_a_mixed_step():
    """One row is a whole prompt, one a piece of a prompt, one a decode."""
    at = table()
    step(at, Run(5, 3), admit=[admission(5, [50, 51, 52], [9])])
    rows, inputs = step(
        at,
        Run(2, 3, blocks=(7,)),
        Run(5, 1, last=53),
        Run(0, 5),
        admit=[admission(2, list(range(20, 26)), [3]), admission(0, list(range(10, 15)), [1, 2])],
    )
    assert rows.slots.tolist() == [2, 5, 0]
    assert rows.samples.tolist() == [False, True, True]
    assert inputs.token_ids.tolist() == [20, 21, 22, 53, 10, 11, 12, 13, 14]
    assert inputs.positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4]
    assert inputs.query_start.tolist() == [0, 3, 4, 9]
    assert inputs.context_lens.tolist() == [3, 4, 5]
    assert inputs.prompt_lens.tolist() == [6, 3, 5]
    assert inputs.block_tables.tolist() == [[3, 0], [9, 0], [1, 2]]
    assert inputs.slot_mapping.tolist() == [12, 13, 14, 39, 4, 5, 6, 7, 8]
    rows, inputs = step(at, Run(2, 3), Run(5, 1, last=54, blocks=(11,)))
    assert rows.start.tolist() == [3, 4] and rows.samples.tolist() == [True, True]
    assert inputs.token_ids.tolist() == [23, 24, 25, 54]
    assert inputs.block_tables.tolist() == [[3, 7], [9, 11]]
    assert inputs.slot_mapping.tolist() == [15, 28, 29, 44]


def test_a_prefix_hit_starts_after_the_cached_tokens():
    at = table()
    rows, inputs = step(at, Run(1, 2), admit=[admission(1, range(10), [4, 5, 6], num_computed=8)])
    assert rows.samples.tolist() == [True]
    assert inputs.positions.tolist() == [8, 9] and inputs.context_lens.tolist() == [10]
    assert inputs.slot_mapping.tolist() == [24, 25]


def test_a_token_on_the_device_is_used_once():
    at = table()
    rows, _ = step(at, Run(3, 2), admit=[admission(3, [1, 2], [0])])
    at.keep_sampled(rows.slots, np.array([77], np.int32))
    _, inputs = step(at, Run(3, 1, last=ON_DEVICE))
    assert inputs.token_ids.tolist() == [77]
    rows, _ = step(at, Run(3, 1, last=ON_DEVICE))
    assert [f.slot for f in rows.failures] == [3]
    at.sampled[4] = 50  # left by an earlier request
    rows, _ = step(at, Run(4, 2, last=ON_DEVICE), admit=[admission(4, [1], [1])])
    assert [f.slot for f in rows.failures] == [4]  # it has sampled nothing yet


def test_blocks_go_to_their_rows_in_order():
    at = table()
    step(at, admit=[admission(s, range(30), [s]) for s in (0, 1, 2)])
    step(at, Run(2, 12, blocks=(20, 21)), Run(0, 1), Run(1, 9, blocks=(30, 31, 32)))
    assert at.block_table[2, :3].tolist() == [2, 20, 21]
    assert at.block_table[1, :4].tolist() == [1, 30, 31, 32]
    assert at.num_blocks[:3].tolist() == [1, 4, 3]
    interleaved = plan([Run(2, 1), Run(0, 1)])
    interleaved = StepPlan(
        epoch=0,
        step_id=0,
        rows=Rows(
            slots=interleaved.rows.slots,
            num_tokens=interleaved.rows.num_tokens,
            last_tokens=interleaved.rows.last_tokens,
            block_rows=pack([1, 0, 1, 0], "H"),
            new_blocks=pack([10, 11, 12, 13]),
        ),
    )
    at.apply(interleaved)
    assert at.block_table[0, :3].tolist() == [0, 10, 12]
    assert at.block_table[2, :5].tolist() == [2, 20, 21, 11, 13]


def test_inputs_are_never_aliases():
    at = table()
    rows = at.apply(plan([Run(0, 6)], admit=[admission(0, range(6), [0, 1])]))
    inputs = at.gather(rows)
    arrays = (at.tokens, at.block_table, at.length, at.num_prompt, at.computed, at.num_blocks, at.sampled)
    for name in (
        "token_ids",
        "positions",
        "query_start",
        "context_lens",
        "prompt_lens",
        "block_tables",
        "slot_mapping",
    ):
        assert not any(np.shares_memory(getattr(inputs, name), array) for array in arrays), name


def poison(at: RequestTable) -> None:
    """Fill everything that no live request owns with garbage, as uninitialised or left-over memory would be."""
    for row in np.flatnonzero(~at.active):
        at.tokens[row] = -12345
        at.block_table[row] = 999_999
        for array in (at.length, at.num_prompt, at.computed, at.num_blocks, at.sampled):
            array[row] = 31_337
        sampling = at.sampling
        for array in (sampling.temperature, sampling.top_p, sampling.min_p, sampling.presence, sampling.repetition):
            array[row] = np.nan
        for array in (sampling.top_k, sampling.seed, sampling.choice, sampling.min_tokens, sampling.logprobs):
            array[row] = 31_337
    for row in np.flatnonzero(at.active):
        at.tokens[row, at.length[row] :] = -12345
        at.block_table[row, at.num_blocks[row] :] = 999_999


def test_poisoned_memory_never_shows():
    """SEC-31: the same plans on a clean table and on one full of garbage read the same."""
    clean, dirty = table(), table()
    plans = [
        plan([Run(0, 3), Run(7, 5)], admit=[admission(0, range(3), [1]), admission(7, range(9), [2, 3])]),
        plan([Run(0, 1, last=8), Run(7, 4, blocks=(4,))]),
        plan([Run(0, 1, last=9, blocks=(5,))], release=[7]),
        plan([Run(7, 2), Run(0, 1, last=10)], admit=[admission(7, [60, 61], [9], sampling=SamplingState(seed=3))]),
        plan([Run(3, 18)], release=[0], admit=[admission(3, range(18), range(10, 15), num_prompt=2)]),
        plan([Run(7, 1, last=5), Run(3, 1, last=6)]),
    ]
    for each in plans:
        poison(dirty)
        seen = []
        for at in (clean, dirty):
            rows = at.apply(each)
            inputs = at.gather(rows)
            at.commit(rows)
            sampling = at.sampling
            columns = [sampling.temperature, sampling.top_p, sampling.seed, sampling.choice, sampling.min_tokens]
            columns += [sampling.logprobs, sampling.prompt_logprobs, sampling.constrained, sampling.repetition]
            arrays = [getattr(inputs, name).tolist() for name in inputs.__slots__]
            produced = [at.produced(int(slot)).tolist() for slot in rows.slots]
            seen.append(
                (arrays, produced, rows.samples.tolist(), [c[rows.slots].tolist() for c in columns], rows.failures)
            )
        assert seen[0] == seen[1]
        assert not seen[0][-1]


class TestOneBadRow:
    """Fails alone: the others run, and read the same as without it."""

    GOOD = Run(1, 1, last=9)

    def at(self) -> RequestTable:
        at = table()
        step(at, Run(1, 2), Run(2, 2), admit=[admission(1, [1, 2], [0]), admission(2, [3, 4], [1])])
        return at

    @pytest.mark.parametrize(
        ("bad", "why"),
        [
            (Run(6), "not known"),
            (Run(60000), "not known"),
            (Run(2, 1, last=100), "last token"),
            (Run(2, 1, last=-3), "last token"),
            (Run(2, 1, last=ON_DEVICE), "last token"),
            (Run(2, 1), "more tokens than it has"),
            (Run(2, 2, last=5), "more tokens than it has"),
            (Run(2, 0, last=5), "computes nothing"),
            (Run(2, 1, last=5, blocks=(40,)), "block that does not exist"),
            (Run(2, 1, last=5, blocks=(-1,)), "block that does not exist"),
        ],
    )
    def test_in_a_row(self, bad, why):
        _, want = step(self.at(), self.GOOD)
        rows, inputs = step(self.at(), bad, self.GOOD)
        assert [f.slot for f in rows.failures] == [bad.slot] and why in rows.failures[0].message
        assert rows.index.tolist() == [1]
        assert [getattr(inputs, n).tolist() for n in inputs.__slots__] == [
            getattr(want, n).tolist() for n in want.__slots__
        ]

    def test_too_few_blocks(self):
        at = self.at()
        step(at, Run(2, 1, last=5), self.GOOD)
        step(at, Run(2, 1, last=5), self.GOOD)
        rows, _ = step(at, Run(2, 1, last=5), Run(1, 1, last=5, blocks=(8,)))
        assert [(f.slot, "too few blocks" in f.message) for f in rows.failures] == [(2, True)]
        assert rows.slots.tolist() == [1]

    @pytest.mark.parametrize(
        "changes",
        [
            {"tokens": [1, 100]},
            {"tokens": [-1, 1]},
            {"tokens": []},
            {"tokens": range(65)},
            {"blocks": [40]},
            {"blocks": [-1]},
            {"num_computed": 3},
            {"num_computed": -1},
            {"num_prompt": 0},
            {"num_prompt": 4},
            {"num_computed": 2, "blocks": []},
            {"slot": 8},
            {"slot": -1},
            {"sampling": SamplingState(logit_bias={100: 1.0})},
            {"sampling": SamplingState(logit_bias={1: float("nan")})},
            {"sampling": SamplingState(logit_bias={-1: 1.0})},
            {"sampling": SamplingState(allowed_token_ids=pack([100]))},
            {"sampling": SamplingState(allowed_token_ids=b"abc")},
            {"sampling": SamplingState(stop_token_ids=pack([-5]), min_tokens=3)},
            {"sampling": SamplingState(bad_words=((1, 100),))},
            {"sampling": SamplingState(temperature=float("nan"))},
            {"sampling": SamplingState(repetition_penalty=0.0)},
            {"sampling": SamplingState(top_p=0.0)},
        ],
    )
    def test_in_an_admission(self, changes):
        values = {"slot": 4, "tokens": [1, 2, 3], "blocks": [5], **changes}
        at = self.at()
        rows, _ = step(at, self.GOOD, admit=[admission(**values)])
        assert [f.slot for f in rows.failures] == [values["slot"]]
        assert rows.slots.tolist() == [1]
        if 0 <= values["slot"] < 8:  # the slot is free again
            rows, inputs = step(at, Run(4, 2), admit=[admission(4, [7, 8], [5])])
            assert not rows.failures and inputs.token_ids.tolist() == [7, 8]

    def test_a_row_of_a_refused_admission_is_reported_once(self):
        rows, _ = step(self.at(), self.GOOD, Run(4, 2), admit=[admission(4, [1, 200], [5])])
        assert [f.slot for f in rows.failures] == [4] and "vocabulary" in rows.failures[0].message

    def test_a_context_that_is_full(self):
        at = table(max_model_len=4)
        step(at, Run(0, 4), admit=[admission(0, [1, 2, 3, 4], [0, 1])])
        rows, _ = step(at, Run(0, 1, last=5))
        assert "longer than the model allows" in rows.failures[0].message


@pytest.mark.parametrize(
    "rows",
    [
        Rows(slots=pack([1], "H"), num_tokens=b"", last_tokens=pack([1])),
        Rows(slots=pack([1], "H"), num_tokens=pack([1], "H"), last_tokens=b"xy"),
        Rows(slots=pack([1, 1], "H"), num_tokens=pack([1, 1], "H"), last_tokens=pack([1, 1])),
        Rows(block_rows=pack([0], "H"), new_blocks=pack([1])),
        Rows(block_rows=pack([0], "H"), new_blocks=b""),
    ],
)
def test_a_plan_that_does_not_fit_together_is_refused(rows):
    with pytest.raises(ValueError, match=r"plan|multiple"):
        table().apply(StepPlan(epoch=0, step_id=0, rows=rows))


def test_it_grows_with_the_longest_request_only():
    at = RequestTable(slots=16, max_model_len=100_000, block_size=16, blocks=10_000, vocab_size=100)
    assert at.tokens.nbytes < 100_000
    step(at, Run(0, 5), admit=[admission(0, range(5), [1])])
    step(at, Run(3, 65_000), admit=[admission(3, [7] * 70_000, range(2, 4400))])
    assert at.tokens[0, :5].tolist() == list(range(5))
    step(at, Run(3, 5001, last=9), Run(0, 1, last=11))
    assert at.produced(3).tolist() == [9] and at.produced(0).tolist() == [11]


def test_release_forgets_what_is_kept():
    at = table()
    penalised = SamplingState(
        presence_penalty=1.0, logprobs=3, prompt_logprobs=2, min_tokens=4, stop_token_ids=pack([1])
    )
    step(at, Run(0, 2), admit=[admission(0, [1, 2], [0], sampling=penalised)])
    step(at, release=[0])
    assert not list(at.sampling.constraints(np.array([0]), np.array([9])))  # their memory is given back
    rows, _ = step(at, Run(0, 2), admit=[admission(0, [3, 4], [0], sampling=GREEDY)])
    assert rows.samples.tolist() == [True]
    assert at.sampling.logprobs[0] == at.sampling.prompt_logprobs[0] == -1
    assert not list(at.sampling.constraints(np.array([0]), np.array([0])))
    assert at.sampled[0] == NO_TOKEN
