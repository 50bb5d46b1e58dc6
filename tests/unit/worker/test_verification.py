"""Proposed tokens in a worker: what stands is what comes without them, and what does not leaves no trace."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from phalanx.sampling.sampler import NO_CANDIDATE, NO_SCORES
from phalanx.step import NO_TOKEN, ON_DEVICE, SamplingState, pack
from phalanx.worker.verification import Places, standing
from phalanx.worker.worker import Worker, open_worker
from tests.helpers.plans import GREEDY, Answer, Run, admission, answer, plan
from tests.helpers.worker_model import VOCAB, engine_config, write_model

PROMPT = [3, 77, 12, 12, 45, 101, 9, 64, 2, 110, 31]
BLOCKS = list(range(12))
STATES = {
    "greedy": GREEDY,
    "drawn": SamplingState(temperature=1.3, seed=5),
    "truncated": SamplingState(temperature=0.9, seed=6, top_k=20, top_p=0.9, min_p=0.01),
    "penalties": SamplingState(
        temperature=0.7, seed=7, presence_penalty=0.8, frequency_penalty=0.9, repetition_penalty=1.4
    ),
    "greedy penalties": SamplingState(temperature=0.0, repetition_penalty=1.7, frequency_penalty=1.5),
    "bias": SamplingState(temperature=1.0, seed=8, logit_bias={9: 6.0, 12: -50.0}),
    "allowed": SamplingState(temperature=1.0, seed=9, allowed_token_ids=pack([4, 9, 12, 45, 64, 77, 101])),
    "bad words": SamplingState(temperature=0.0, bad_words=((9,), (12, 45), (1, 2, 3))),
    "minimum": SamplingState(temperature=1.0, seed=10, min_tokens=6, stop_token_ids=pack(range(0, VOCAB, 2))),
    "logprobs": SamplingState(temperature=1.0, seed=11, logprobs=3),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def started(model: Path, **options: object) -> Worker:
    worker = open_worker(engine_config(model, **options))
    worker.load()
    worker.allocate()
    return worker


@pytest.fixture(scope="module", params=["float32", "bfloat16", "int8"])
def worker(request: pytest.FixtureRequest, model: Path) -> Iterator[Worker]:
    """In each kind of arithmetic: kernels give a row the same bits in any batch."""
    options = {"quantization": "int8"} if request.param == "int8" else {"dtype": request.param}
    worker = started(model, **options)
    yield worker
    worker.close()


def run(worker: Worker, *runs: Run, **rest: object) -> Answer:
    result = worker.run(plan(runs, **rest, epoch=worker.epoch))  # type: ignore[arg-type]
    assert result is not None
    return answer(result)


def admitted(worker: Worker, sampling: SamplingState, slot: int = 0) -> int:
    """Its first token."""
    admit = [admission(slot, PROMPT, BLOCKS, sampling=sampling)]
    return run(worker, Run(slot, len(PROMPT)), admit=admit).tokens[slot]


def one_by_one(worker: Worker, sampling: SamplingState, count: int) -> tuple[list[int], list[object]]:
    """Tokens, and their log-probabilities after the first."""
    tokens, logprobs = [admitted(worker, sampling)], []
    while len(tokens) < count:
        got = run(worker, Run(0, 1, tokens[-1]))
        tokens.append(got.tokens[0])
        logprobs.append(got.logprobs.get(0))
    run(worker, release=[0])
    return tokens, logprobs


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("right", [0, 1, 3, 4])
def test_a_chain_is_what_comes_one_by_one(worker: Worker, name: str, right: int) -> None:
    """Of four proposed tokens, the first `right` are those that come."""
    sampling = STATES[name]
    want, logprobs = one_by_one(worker, sampling, 17)
    tokens, accepted = [admitted(worker, sampling)], ()
    while len(tokens) + 5 <= len(want):
        proposed = want[len(tokens) : len(tokens) + 4]
        proposed[right:] = [(token + 1) % VOCAB for token in proposed[right:]]
        got = run(worker, Run(0, 1, tokens[-1], accepted=accepted, proposed=tuple(proposed)))
        assert got.chains[0] == want[len(tokens) : len(tokens) + right + 1]
        entries = got.chain_logprobs.get(0, [None] * (right + 1))
        assert entries == logprobs[len(tokens) - 1 : len(tokens) + right]
        tokens += got.chains[0]
        accepted = tuple(got.chains[0][:-1])
    # Refused tokens are overwritten: what follows without proposals is the same, too.
    while len(tokens) < len(want):
        tokens.append(run(worker, Run(0, 1, tokens[-1], accepted=accepted)).tokens[0])
        accepted = ()
    assert tokens == want
    run(worker, release=[0])


def test_rows_with_and_without_proposals_share_a_step(worker: Worker) -> None:
    want = {slot: one_by_one(worker, list(STATES.values())[slot], 8)[0] for slot in range(3)}
    admit = [
        admission(slot, PROMPT, range(12 * slot, 12 * slot + 12), sampling=list(STATES.values())[slot])
        for slot in range(3)
    ]
    first = run(worker, *[Run(slot, len(PROMPT)) for slot in range(3)], admit=admit).tokens
    rows = [
        Run(2, 1, first[2], proposed=tuple(want[2][1:4])),
        Run(0, 1, ON_DEVICE),
        Run(1, 1, first[1], proposed=(want[1][1], (want[1][2] + 1) % VOCAB)),
    ]
    got = run(worker, *rows)
    assert got.chains == {2: want[2][1:5], 0: want[0][1:2], 1: want[1][1:3]}
    rows = [
        Run(1, 1, want[1][2], accepted=(want[1][1],)),
        Run(0, 1, ON_DEVICE, proposed=tuple(want[0][2:6])),
        Run(2, 1, want[2][4], accepted=tuple(want[2][1:4])),
    ]
    got = run(worker, *rows)
    assert got.chains == {1: [want[1][3]], 0: want[0][2:7], 2: [want[2][5]]}
    run(worker, release=[0, 1, 2])


def test_each_place_has_its_own_mask(worker: Worker) -> None:
    masks = [np.random.default_rng(place).random(VOCAB) < 0.3 for place in range(4)]
    tokens = [admitted(worker, GREEDY)]
    for mask in masks:
        tokens.append(run(worker, Run(0, 1, tokens[-1], allowed=mask)).tokens[0])
    run(worker, release=[0])
    first = admitted(worker, GREEDY)
    got = run(worker, Run(0, 1, first, allowed=masks, proposed=tuple(tokens[1:4])))
    assert got.chains[0] == tokens[1:]
    run(worker, release=[0])


def test_drawn_tokens_after_a_proposed_one_have_the_right_distribution(model: Path) -> None:
    """Chi-squared over many seeds, the tokens that are rare counted together: whoever gets the proposed token draws the
    one after it as often as the model says."""
    worker = started(model, max_num_seqs=250, kv_cache_memory_bytes="4M")
    temperature, proposed, counts, accepted = 0.6, 77, np.zeros(VOCAB), 0
    raw: list[torch.Tensor] = []
    logits = worker._decoder.logits  # type: ignore[union-attr]
    worker._decoder.logits = lambda hidden: raw.append(logits(hidden)) or raw[-1].clone()  # type: ignore
    for first_seed in range(0, 1500, 250):
        states = [
            SamplingState(temperature=temperature, seed=first_seed + slot, logit_bias={proposed: 8.0})  # drawn often
            for slot in range(250)
        ]
        admit = [
            admission(slot, PROMPT, range(3 * slot, 3 * slot + 3), sampling=state) for slot, state in enumerate(states)
        ]
        run(worker, *[Run(slot, 10) for slot in range(250)], admit=admit)
        got = run(worker, *[Run(slot, 1, proposed=(proposed,)) for slot in range(250)])
        seconds = [chain[1] for chain in got.chains.values() if len(chain) == 2]
        counts += np.bincount(seconds, minlength=VOCAB)
        accepted += len(seconds)
        run(worker, release=range(250))
    worker.close()
    scores = raw[-1][1].double()
    scores[proposed] += 8.0
    expected = (scores / temperature).softmax(-1).numpy() * accepted
    assert accepted > 700
    common = expected >= 5
    pairs = [*zip(counts[common], expected[common], strict=True), (counts[~common].sum(), expected[~common].sum())]
    assert len(pairs) > 4
    assert sum((seen - wanted) ** 2 / wanted for seen, wanted in pairs) < 2 * len(pairs) + 12


class TestTrouble:
    @pytest.fixture
    def worker(self, model: Path) -> Iterator[Worker]:
        worker = started(model)
        yield worker
        worker.close()

    def test_a_place_that_fails_ends_the_chain_there(self, worker: Worker) -> None:
        """It is reached in the next step, as without proposals, and fails then."""
        want, _ = one_by_one(worker, GREEDY, 6)
        nothing = np.zeros(VOCAB, np.bool_)
        everything = np.ones(VOCAB, np.bool_)
        first = admitted(worker, GREEDY)
        masks = [everything, everything, nothing, everything]
        got = run(worker, Run(0, 1, first, allowed=masks, proposed=tuple(want[1:4])))
        assert got.chains == {0: want[1:3]} and not got.failures
        got = run(worker, Run(0, 1, want[2], accepted=(want[1],), allowed=nothing, proposed=tuple(want[3:5])))
        assert got.failures == {0: NO_CANDIDATE} and not got.chains

    def test_a_proposed_token_that_breaks_the_scores_after_it_harms_nobody(
        self, worker: Worker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        want, _ = one_by_one(worker, GREEDY, 4)
        first = admitted(worker, GREEDY)
        logits = worker._decoder.logits  # type: ignore[union-attr]

        def broken(hidden: torch.Tensor) -> torch.Tensor:
            scores: torch.Tensor = logits(hidden)
            scores[1:] = float("nan")
            return scores

        monkeypatch.setattr(worker._decoder, "logits", broken)
        monkeypatch.setattr(worker._runner, "_decoding_of", lambda plan: None)  # the twin's
        got = run(worker, Run(0, 1, first, proposed=(want[1], want[2])))
        assert got.chains == {0: [want[1]]} and not got.failures
        for cache in worker._pool.caches:  # type: ignore[union-attr]
            cache.key.fill_(float("nan"))
        assert run(worker, Run(0, 1, want[1])).failures == {0: NO_SCORES}

    @pytest.mark.parametrize(
        ("row", "why"),
        [
            (Run(0, 1, 5, proposed=(VOCAB,)), "proposed"),
            (Run(0, 1, 5, proposed=(-1,)), "proposed"),
            (Run(0, 1, 5, proposed=(1,) * 40), "proposed"),
            (Run(0, 1, 5, accepted=(VOCAB,)), "accepted"),
            (Run(0, 1, 5, accepted=(1,) * 40), "accepted"),
            (Run(0, 1, ON_DEVICE, accepted=(1,)), "last token"),
            (Run(7, 1, 5, accepted=(1,)), "not known"),
        ],
    )
    def test_a_row_that_contradicts_itself_fails_alone(self, worker: Worker, row: Run, why: str) -> None:
        admitted(worker, GREEDY)
        other = admission(1, PROMPT, range(20, 32))
        run(worker, Run(1, len(PROMPT)), admit=[other])
        if row.last == ON_DEVICE:
            run(worker, Run(0, 1, 5, proposed=(1, 2)))
        got = run(worker, row, Run(1, 1, 5, proposed=(6,)))
        assert list(got.failures) == [row.slot] and why in got.failures[row.slot]
        assert list(got.chains) == [1]

    def test_tokens_are_proposed_only_where_one_is_drawn(self, worker: Worker) -> None:
        got = run(worker, Run(0, 5, proposed=(6,)), admit=[admission(0, PROMPT, BLOCKS)])
        assert list(got.failures) == [0]

    def test_arrays_that_do_not_fit_are_an_error_of_the_plan(self, worker: Worker) -> None:
        admitted(worker, GREEDY)
        step = plan([Run(0, 1, 5)])
        rows = type(step.rows)(slots=step.rows.slots, num_tokens=step.rows.num_tokens,
                               last_tokens=step.rows.last_tokens, proposed_rows=pack([1], "H"),
                               proposed=pack([4]))  # fmt: skip
        with pytest.raises(ValueError, match="proposed"):
            worker.run(type(step)(epoch=0, step_id=0, rows=rows))


def test_places() -> None:
    places = Places.of(np.array([2, 0, 1]))
    assert places.row.tolist() == [0, 0, 0, 1, 2, 2]
    assert places.ahead.tolist() == [0, 1, 2, 0, 0, 1]
    assert places.first.tolist() == [0, 3, 4]


@pytest.mark.parametrize(
    ("sampled", "proposed", "count"),
    [
        ([5, 6, 7], [5, 6], 3),
        ([5, 6, 7], [5, 9], 2),
        ([5, 6, 7], [9, 6], 1),
        ([5], [], 1),
        ([NO_TOKEN, 6], [5], 0),
        ([5, NO_TOKEN], [5], 1),
        ([5, NO_TOKEN], [6], 1),
    ],
)
def test_what_stands(sampled: list[int], proposed: list[int], count: int) -> None:
    assert standing(np.array(sampled, np.int32), np.array(proposed, np.int32)) == count
