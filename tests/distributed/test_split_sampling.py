"""Tokens chosen by ranks that each have some tokens' logits: those of one rank with all, without gathering them.

Ranks are threads in lock step; what they exchange is counted. `tests.helpers.sampling` is the plain definition.
"""

from __future__ import annotations

import threading
from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from phalanx.distributed.collectives import Groups
from phalanx.distributed.mesh import Mesh
from phalanx.distributed.partition import Partition
from phalanx.kernels import sampling as kernels
from phalanx.kernels.library import native
from phalanx.sampling import sampler, split_vocabulary
from phalanx.sampling.parameters import SamplingTable
from phalanx.sampling.sampler import NO_CANDIDATE, NO_SCORES, Sampled
from phalanx.sampling.split_vocabulary import SplitSampler
from phalanx.step import NO_TOKEN, SamplingState, StepResult, decode_plan, encode, pack, unpack
from phalanx.worker.worker import Worker, open_worker
from tests.helpers.lockstep import LockstepGroup, run_ranks
from tests.helpers.plan_script import Reference, Script
from tests.helpers.plans import GREEDY, Answer, Run, admission, answer, plan
from tests.helpers.sampling import Row, batch_of, reference_token, sample_rows
from tests.helpers.worker_model import HIDDEN, LAYERS, VOCAB, engine_config, reference_decoder, write_model


@dataclass
class Counting:
    """A group that counts calls, and the largest number of entries a rank brought to one."""

    inner: LockstepGroup
    calls: list[tuple[str, int]] = field(default_factory=list)

    def __getattr__(self, name: str):
        operation = getattr(self.inner, name)
        if not callable(operation) or name == "rounds":
            return operation

        def counted(tensor, *args):
            self.calls.append((name, tensor.numel()))
            return operation(tensor, *args)

        return counted


@dataclass
class Outcome:
    sampled: Sampled
    gathered: int
    calls: list[tuple[str, int]]


class _Here(threading.local):
    plain = False
    """Whether this rank has no native library."""


HERE = _Here()


@pytest.fixture(autouse=True)
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "native", lambda: None if HERE.plain else native())


def split_sample(rows: list[Row], vocabulary: Partition, plain: Container[int] = ()) -> list[Outcome]:
    """What every rank says; those in `plain` have no native library."""
    logits = torch.from_numpy(np.stack([row.logits for row in rows]).astype(np.float32))

    def body(group: LockstepGroup) -> Outcome:
        HERE.plain = group.rank in plain
        counting = Counting(group)
        split = SplitSampler(counting, vocabulary)
        span = vocabulary.ranges[group.rank]
        table, batch = batch_of(rows, span=span)
        return Outcome(split.sample(logits[:, slice(*span)].clone(), table, batch), split.gathered_rows, counting.calls)

    return run_ranks(vocabulary.ranks, body)


def check(rows: list[Row], vocabulary: Partition) -> Outcome:
    """All ranks say the same, and what one rank says. Returns rank 0's outcome."""
    want = sample_rows(rows)
    outcomes = split_sample(rows, vocabulary)
    for outcome in outcomes:
        got = outcome.sampled
        assert got.tokens.tolist() == want.tokens.tolist()
        assert got.failures == want.failures
        assert got.logprobs.keys() == want.logprobs.keys()
        for row, entry in got.logprobs.items():
            expected = want.logprobs[row]
            assert (entry.rank, entry.top_ids) == (expected.rank, expected.top_ids)
            assert entry.logprob == pytest.approx(expected.logprob, abs=1e-5) and entry.logprob <= 0
            np.testing.assert_allclose(
                np.frombuffer(entry.top_logprobs, "<f4"), np.frombuffer(expected.top_logprobs, "<f4"), atol=1e-5
            )
        assert [call[0] for call in outcome.calls] == [call[0] for call in outcomes[0].calls]
        assert outcome.gathered == outcomes[0].gathered
    first = outcomes[0]
    assert all(o.sampled.logprobs == first.sampled.logprobs for o in outcomes), "ranks report different numbers"
    return first


def random_logits(rng: np.random.Generator, vocab: int, width: float = 3.0) -> np.ndarray:
    return rng.normal(0, width, vocab).astype(np.float32)


CUTS = [
    Partition.even(701, 2),
    Partition.even(701, 3),
    Partition.weighted(701, (5, 1, 1, 3)),
    Partition(701, ((0, 1), (1, 700), (700, 701))),
]


@pytest.mark.parametrize("cut", CUTS, ids=lambda p: str(p.lengths))
def test_plain_draws(cut: Partition) -> None:
    """Greedy and every kind of truncation, many seeds: as one rank, in one exchange."""
    rng = np.random.default_rng(1)
    kinds = [
        {"temperature": 0.0}, {"temperature": 1e-7}, {"temperature": 0.7}, {"temperature": 1.0, "top_k": 5},
        {"temperature": 1.3, "top_p": 0.8}, {"temperature": 0.9, "min_p": 0.05}, {"temperature": 1e-4},
        {"temperature": 1.1, "top_k": 40, "top_p": 0.9, "min_p": 0.01}, {"temperature": 1.0, "top_k": 1},
    ]  # fmt: skip
    rows = [
        Row(random_logits(rng, 701, 6.0), SamplingState(**kind, seed=int(rng.integers(2**63)), choice=i % 3))
        for i, kind in enumerate(kinds * 12)
    ]
    outcome = check(rows, cut)
    assert outcome.gathered == 0
    (name, numbers), *more = outcome.calls
    assert name == "all_gather" and not more
    drawn = [row.state for row in rows if row.state.temperature > 1e-5]
    free = sum(not state.top_k and state.top_p == 1 and not state.min_p for state in drawn)
    assert numbers == 3 * len(rows) + free * 2 + (len(drawn) - free) * (1 + 2 * 128)


def test_greedy_steps_send_three_numbers_a_row() -> None:
    rng = np.random.default_rng(2)
    rows = [Row(random_logits(rng, 701), GREEDY) for _ in range(9)]
    assert check(rows, CUTS[1]).calls == [("all_gather", 27)]


def test_draws_from_all_tokens_send_five_numbers_a_row() -> None:
    """However flat they are, and in every kind of cut: a token and its logit beside what every row sends."""
    rng = np.random.default_rng(14)
    for width in (0.0, 0.1, 2.0):
        rows = [Row(random_logits(rng, 5003, width), SamplingState(seed=i, temperature=1.5)) for i in range(30)]
        rows += [Row(random_logits(rng, 5003, width), SamplingState(seed=i, top_k=5003)) for i in range(3)]
        for cut in (Partition.even(5003, 3), Partition(5003, ((0, 1), (1, 5000), (5000, 5003)))):
            outcome = check(rows, cut)
            assert outcome.calls == [("all_gather", 33 * 5)] and outcome.gathered == 0


def never(*args) -> None:
    raise AssertionError("this was to be native")


@pytest.mark.skipif(native() is None, reason="the native library was not built")
def test_with_the_library_rows_are_sampled_natively(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those whose logits are gathered."""
    for name in ("_log_sums", "first_candidates", "kept_counts", "winners"):
        monkeypatch.setattr(split_vocabulary, name, never)
    for name in ("first_candidates", "kept_counts", "winners"):
        monkeypatch.setattr(sampler, name, never)
    rng = np.random.default_rng(15)
    rows = [Row(random_logits(rng, 701, 6.0 * (i % 2)), SamplingState(seed=i, top_p=0.8)) for i in range(9)]
    assert check(rows, CUTS[1]).gathered == 5


@pytest.mark.parametrize("candidates", [3, 128, 900])
@pytest.mark.parametrize("cut", CUTS, ids=lambda p: str(p.lengths))
@pytest.mark.filterwarnings("error")
def test_ranks_with_the_library_and_without_it_say_the_same(
    cut: Partition, candidates: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all kinds of rows, also of such as are no numbers, or equal."""
    monkeypatch.setattr(split_vocabulary, "CANDIDATES", (candidates,))
    rng, rows = np.random.default_rng(16), []
    kinds = [
        {"top_k": 1}, {"top_k": 7}, {"top_k": 9000, "top_p": 0.3713}, {"top_p": 0.8713}, {"top_p": 1e-9},
        {"min_p": 0.07}, {"min_p": 1.0}, {"top_k": 50, "top_p": 0.9137, "min_p": 1e-6}, {},
    ]  # fmt: skip
    for i in range(8 * len(kinds)):
        temperature = float(rng.choice([1e-4, 0.7, 1.3]))
        logits = random_logits(rng, 701, float(rng.choice([0.0, 0.5, 6.0])))
        state = SamplingState(**kinds[i % len(kinds)], temperature=temperature, seed=i)
        if i % 5 == 1:
            logits = logits.round() * rng.choice([1, -0.0], 701).astype(np.float32)
        if i % 5 == 2:
            logits[rng.random(701) < 0.95] = -np.inf
        if i % 11 == 3:
            logits[rng.integers(701)] = rng.choice([np.nan, np.inf])
        if i % 11 == 4:
            logits[:] = -np.inf
        rows.append(Row(logits, state, allowed_by_grammar=rng.random(701) < 0.5 if i % 7 == 6 else None))
    want = split_sample(rows, cut)
    assert (want[0].gathered == 0) == (candidates == 900) and len(want[0].sampled.failures) > 10
    for plain in ((0,), (1, 2), range(cut.ranks)):
        for outcome, other in zip(split_sample(rows, cut, plain), want, strict=True):
            assert outcome.sampled.tokens.tolist() == other.sampled.tokens.tolist()
            assert outcome.sampled.failures == other.sampled.failures
            assert (outcome.gathered, outcome.calls) == (other.gathered, other.calls)


def test_small_top_k_sends_few_candidates() -> None:
    rng = np.random.default_rng(3)
    rows = [Row(random_logits(rng, 701), SamplingState(top_k=4, seed=i)) for i in range(9)]
    assert check(rows, CUTS[0]).calls == [("all_gather", 9 * (3 + 1 + 2 * 4))]


@pytest.mark.parametrize("cut", CUTS, ids=lambda p: str(p.lengths))
def test_constraints(cut: Partition) -> None:
    """Masks, allowed ids, bad words, minimum length, biases and penalties act on each rank's own tokens."""
    rng = np.random.default_rng(4)
    rows = []
    for i in range(60):
        prompt = tuple(rng.integers(0, 701, 12).tolist())
        output = tuple(rng.integers(0, 701, int(rng.integers(0, 9))).tolist())
        logits = random_logits(rng, 701)
        # The likeliest tokens are those that the constraints are about.
        liked = rng.choice(701, 30, replace=False)
        logits[liked] += 6
        word = [int(t) for t in liked[:3]]
        state = SamplingState(
            temperature=float(rng.choice([0.0, 0.8])),
            seed=i,
            presence_penalty=float(rng.choice([0.0, 0.9])),
            frequency_penalty=float(rng.choice([0.0, 0.4])),
            repetition_penalty=float(rng.choice([1.0, 1.4])),
            logit_bias={int(t): float(rng.normal(0, 5)) for t in liked[:6]} if i % 3 == 0 else {},
            bad_words=((word[0],), (output[-1], word[1]), (700,), (0,)) if i % 4 == 1 and output else (),
            min_tokens=int(rng.integers(0, 9)),
            stop_token_ids=pack(word),
            allowed_token_ids=pack(sorted(liked.tolist())) if i % 5 == 2 else b"",
            logprobs=int(rng.choice([-1, 0, 3])),
        )
        allowed = rng.random(701) < 0.5 if i % 6 == 3 else None
        rows.append(Row(logits, state, prompt, output, allowed))
    outcome = check(rows, cut)
    assert [int(t) for t in outcome.sampled.tokens] == [reference_token(row) for row in rows]


def test_tokens_allowed_on_one_rank_only() -> None:
    """Ranks that have none of them say nothing that counts."""
    rng = np.random.default_rng(5)
    for place in (0, 350, 690):
        ids = list(range(place, place + 9))
        states = [
            SamplingState(temperature=t, seed=s, allowed_token_ids=pack(ids)) for t in (0.0, 1.0, 5.0) for s in range(4)
        ]
        rows = [Row(random_logits(rng, 701), state) for state in states]
        rows += [
            Row(random_logits(rng, 701), SamplingState(seed=s), allowed_by_grammar=np.isin(np.arange(701), ids))
            for s in range(6)
        ]
        outcome = check(rows, CUTS[1])
        assert outcome.gathered == 0 and set(outcome.sampled.tokens.tolist()) <= set(ids)


@pytest.mark.parametrize("cut", CUTS, ids=lambda p: str(p.lengths))
def test_equal_logits_go_by_token_id(cut: Partition) -> None:
    rng = np.random.default_rng(6)
    coarse = [rng.integers(-3, 4, 701).astype(np.float32) for _ in range(20)]
    coarse[3][:] = 0.0
    coarse[4][:] = np.where(np.arange(701) % 2, 0.0, -0.0)
    rows = [Row(logits, replace_state(GREEDY, logprobs=9)) for logits in coarse]
    rows += [Row(logits, SamplingState(top_k=20, seed=i, logprobs=5)) for i, logits in enumerate(coarse)]
    rows += [Row(logits, SamplingState(seed=i, logprobs=0)) for i, logits in enumerate(coarse)]
    outcome = check(rows, cut)
    assert outcome.sampled.tokens[:20].tolist() == [int(np.flatnonzero(c == c.max())[0]) for c in coarse]


def replace_state(state: SamplingState, **changes) -> SamplingState:
    return msgspec.structs.replace(state, **changes)


def test_wide_rows_gather_alone_and_are_counted() -> None:
    """Nuclei, top-k and min-p beyond the candidates: only these rows' logits are gathered, in one go."""
    rng = np.random.default_rng(7)
    narrow = [Row(random_logits(rng, 5003, 8.0), SamplingState(seed=i)) for i in range(5)]
    flat = [Row(random_logits(rng, 5003, 0.1), SamplingState(seed=i, min_p=0.01)) for i in range(4)]
    nucleus = [Row(random_logits(rng, 5003, 0.5), SamplingState(seed=i, top_p=0.9)) for i in range(3)]
    wide_k = [Row(random_logits(rng, 5003, 0.5), SamplingState(seed=i, top_k=3000)) for i in range(3)]
    rows = [row for group in zip(narrow, flat + nucleus, strict=False) for row in group] + flat + wide_k
    cut = Partition.weighted(5003, (2, 1, 2))
    outcome = check(rows, cut)
    wide = len(rows) - 5
    assert outcome.gathered == wide
    assert outcome.calls[1:] == [("all_gather", wide * cut.lengths[0])]


def test_gathering_goes_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(8)
    monkeypatch.setattr("phalanx.sampling.split_vocabulary.CHUNK_ELEMENTS", 3 * 5003)
    rows = [Row(random_logits(rng, 5003, 0.1), SamplingState(seed=i, top_p=0.9, logprobs=i % 3)) for i in range(8)]
    rows += [Row(random_logits(rng, 5003, 8.0), SamplingState(seed=i)) for i in range(4)]
    outcome = check(rows, Partition.even(5003, 2))
    assert outcome.gathered >= 7
    assert sum(name == "all_gather" and n in (2502 * k for k in (1, 2, 3)) for name, n in outcome.calls) >= 3


def test_vocabulary_smaller_than_the_candidates() -> None:
    """Then every rank says all it knows, and nothing is ever gathered."""
    rng = np.random.default_rng(9)
    for size, ranks in ((7, 2), (131, 3), (5, 5)):
        rows = [
            Row(random_logits(rng, size, 0.3), SamplingState(seed=i, logprobs=i % 9, min_p=1e-6 * (i % 2)))
            for i in range(40)
        ]
        outcome = check(rows, Partition.even(size, ranks))
        assert outcome.gathered == 0


@pytest.mark.parametrize("num_top", [0, 1, 20, 150, 701])
def test_logprobs_of_any_number(num_top: int) -> None:
    """Also all of them, and of tokens that are far down the order."""
    rng = np.random.default_rng(10)
    rows = []
    for i in range(12):
        logits = random_logits(rng, 701)
        rows.append(Row(logits, SamplingState(temperature=float(i % 2), seed=i, logprobs=num_top)))
        unlikely = pack([int(np.argsort(logits)[i * 7])])
        rows.append(Row(logits, SamplingState(seed=i, logprobs=num_top, allowed_token_ids=unlikely)))
    for cut in CUTS:
        outcome = check(rows, cut)
        assert outcome.gathered == 0
        assert [name for name, _ in outcome.calls if name == "all_reduce"] == ["all_reduce"] * (num_top < 640)


def test_logprobs_of_tokens_that_cannot_be() -> None:
    """Models may rule tokens out themselves; those come last, by id, whichever rank has them."""
    rng = np.random.default_rng(13)
    rows = [Row(random_logits(rng, 61), SamplingState(seed=i, logprobs=61)) for i in range(6)]
    for row in rows:
        row.logits[rng.choice(61, 20, replace=False)] = -np.inf
    for cut in (Partition(61, ((0, 3), (3, 60), (60, 61))), Partition.even(61, 2)):
        check(rows, cut)


@pytest.mark.parametrize("where", [0, 350, 700])
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.filterwarnings("error")
def test_rows_that_are_no_numbers_fail_alone_and_everywhere(where: int, value: float) -> None:
    """The rank that has the bad number and those that have not say the same."""
    rng = np.random.default_rng(11)
    rows = [
        Row(random_logits(rng, 701), SamplingState(temperature=t, seed=i, logprobs=2))
        for i, t in enumerate((0.0, 1.0) * 4)
    ]
    for bad in (2, 5):
        rows[bad].logits[where] = value
    rows[5] = replace(rows[5], allowed_by_grammar=np.arange(701) == 123)  # hides the number, not the failure
    nothing = np.zeros(701, np.bool_)
    rows[6] = replace(rows[6], allowed_by_grammar=nothing)
    rows[7] = replace(rows[7], allowed_by_grammar=nothing)
    rows[1] = replace(rows[1], logits=np.full(701, -np.inf, np.float32))
    outcome = check(rows, CUTS[1])
    assert outcome.sampled.failures == {
        1: NO_SCORES, 2: NO_SCORES, 5: NO_SCORES, 6: NO_CANDIDATE, 7: NO_CANDIDATE,
    }  # fmt: skip
    assert (outcome.sampled.tokens == NO_TOKEN).sum() == 5


def test_seeded_draws_follow_the_plain_definition() -> None:
    """300 random rows against the sampler that sorts everything in double precision."""
    rng = np.random.default_rng(12)
    rows = [
        Row(
            random_logits(rng, 701, float(rng.choice([0.5, 2, 5]))),
            SamplingState(
                temperature=float(rng.choice([0.5, 1.0, 1.7])),
                top_k=int(rng.choice([0, 0, 7, 300])),
                top_p=float(rng.choice([1.0, 0.5, 0.95])),
                min_p=float(rng.choice([0.0, 0.02])),
                seed=int(rng.integers(2**63)),
            ),
        )
        for _ in range(300)
    ]
    for outcome in split_sample(rows, CUTS[2]):
        assert outcome.sampled.tokens.tolist() == [reference_token(row) for row in rows]


def test_a_table_for_some_tokens_refuses_what_one_for_all_does() -> None:
    """An admission is judged by the whole vocabulary, so that ranks do not disagree about it."""
    for state in (
        SamplingState(allowed_token_ids=pack([99, 100])), SamplingState(logit_bias={100: 1.0}),
        SamplingState(bad_words=((3, 100),)), SamplingState(stop_token_ids=pack([100]), min_tokens=1),
    ):  # fmt: skip
        for span in ((0, 40), (40, 100)):
            with pytest.raises(ValueError, match="outside the vocabulary of 100"):
                SamplingTable(1, 100, span).admit(0, state, np.zeros(3, np.int32), 3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


class TestRunners:
    """Whole workers in lock step, with a random script that uses everything, against one worker."""

    @staticmethod
    def run_workers(model: Path, plans: Sequence[bytes], ranks: int, weights: tuple[float, ...] = ()) -> list:
        def body(group: LockstepGroup):
            worker = open_worker(
                engine_config(model, kv_cache_memory_bytes="200K"), mesh=Mesh(tp=ranks), rank=group.rank,
                groups=Groups(tp=group), tensor_weights=(weights,) if weights else (),
            )  # fmt: skip
            worker.load()
            worker.allocate(blocks=90)
            assert worker._runner is not None and worker._runner.split is not None
            results = [worker.run(decode_plan(data)) for data in plans]
            return results, worker._runner.split.gathered_rows

        return run_ranks(ranks, body)

    @pytest.mark.parametrize(("ranks", "weights"), [(2, ()), (3, (1.0, 3.0, 2.0))])
    @pytest.mark.parametrize(("candidates", "proposing"), [(128, False), (3, False), (128, True), (3, True)])
    def test_random_script(
        self, model: Path, ranks: int, weights: tuple[float, ...], candidates: int, proposing: bool,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:  # fmt: skip
        """With more candidates than tokens, so that none is missing, and with so few that many rows gather; and where
        tokens are proposed."""
        monkeypatch.setattr("phalanx.sampling.split_vocabulary.CANDIDATES", (candidates,))
        alone = started(model)
        script = Script(np.random.default_rng(21), VOCAB, slots=8, blocks=90, block_size=4, max_len=60)
        script.reference = Reference(reference_decoder(model)) if proposing else None
        plans, want = [], []
        for _ in range(50):
            step = script.next()
            plans.append(encode(step))
            result = alone.run(step)
            assert result is not None
            want.append(answer(result))
            script.take(want[-1])
        outcomes = self.run_workers(model, plans, ranks, weights)
        for results, gathered in outcomes:
            assert gathered == outcomes[0][1] and (gathered > 20) == (candidates == 3)
            for result, expected in zip(results, want, strict=True):
                assert_same(result, expected)
        assert sum(len(w.tokens) for w in want) > 60 and any(w.logprobs for w in want)

    def test_a_step_exchanges_twice_a_layer(self, model: Path) -> None:
        """And once for the token table and once to sample, however many rows there are: nothing else, nothing larger
        than hidden states."""

        def body(group: LockstepGroup) -> list[tuple[str, int]]:
            counting = Counting(group)
            worker = open_worker(
                engine_config(model, kv_cache_memory_bytes="200K"), mesh=Mesh(tp=2), rank=group.rank,
                groups=Groups(tp=counting),
            )  # fmt: skip
            worker.load()
            worker.allocate(blocks=40)
            admit = [admission(slot, [5, 6, 7], [slot]) for slot in range(4)]
            worker.run(plan([Run(slot, 3) for slot in range(4)], admit=admit))
            counting.calls.clear()
            worker.run(plan([Run(slot, 1, 9) for slot in range(4)]))
            return counting.calls

        for calls in run_ranks(2, body):
            assert calls == [("all_reduce", 4 * HIDDEN)] * (1 + 2 * LAYERS) + [("all_gather", 4 * 3)]

    def test_prompt_logprobs_and_a_failing_row(self, model: Path) -> None:
        """Prompt log-probabilities in chunks; a row that has nothing to choose fails on all ranks, the others go on."""
        prompt = [3, 77, 12, 12, 45, 101, 9, 64, 2, 110, 31]
        scored = replace_state(GREEDY, prompt_logprobs=4, logprobs=2)
        bias = replace_state(GREEDY, allowed_token_ids=pack([9]))
        mask = np.zeros(VOCAB, np.bool_)
        mask[10] = True
        steps = [
            plan(
                [Run(0, 4), Run(1, 11), Run(2, 11, allowed=mask)],
                admit=[
                    admission(0, prompt, [0, 1, 2], sampling=scored),
                    admission(1, prompt, [3, 4, 5]),
                    admission(2, prompt, [6, 7, 8], sampling=bias),
                ],
            ),
            plan([Run(0, 7), Run(1, 1, 5)]),
        ]
        alone = started(model)
        want = [answer(alone.run(step)) for step in steps]
        assert want[0].failures == {2: NO_CANDIDATE} and want[0].prompt_logprobs and want[1].prompt_logprobs
        for results, _ in self.run_workers(model, [encode(step) for step in steps], 3):
            for result, expected in zip(results, want, strict=True):
                assert_same(result, expected)


def started(model: Path) -> Worker:
    worker = open_worker(engine_config(model, kv_cache_memory_bytes="600K"))
    worker.load()
    worker.allocate(blocks=90)
    return worker


def assert_same(result: StepResult | None, want: Answer) -> None:
    """Tokens, failures, and log-probabilities within float noise."""
    assert result is not None
    got = answer(result)
    assert got.chains == want.chains and got.failures == want.failures
    assert got.logprobs.keys() == want.logprobs.keys() and got.prompt_logprobs.keys() == want.prompt_logprobs.keys()
    pairs = []
    for slot, entries in want.chain_logprobs.items():
        pairs += list(zip(got.chain_logprobs[slot], entries, strict=True))
    for slot, (start, entries) in want.prompt_logprobs.items():
        assert got.prompt_logprobs[slot][0] == start
        pairs += list(zip(got.prompt_logprobs[slot][1], entries, strict=True))
    for mine, theirs in pairs:
        assert mine.rank == theirs.rank and unpack(mine.top_ids) == unpack(theirs.top_ids)
        assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        np.testing.assert_allclose(
            np.frombuffer(mine.top_logprobs, "<f4"), np.frombuffer(theirs.top_logprobs, "<f4"), atol=1e-4
        )
