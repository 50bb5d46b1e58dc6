"""The table of requests under random plans, right and wrong ones: native and twin change it alike."""

import dataclasses

import numpy as np
import pytest

from phalanx.kernels import request_rows
from phalanx.kernels.request_rows import TableView
from phalanx.step import NO_TOKEN, ON_DEVICE, SamplingState
from phalanx.worker.request_table import RequestTable
from tests.helpers.plans import GREEDY, Run, admission, plan

SLOTS, BLOCKS, BLOCK, VOCAB, LONGEST = 6, 30, 4, 50, 300
COLUMNS = ("active", "length", "num_prompt", "computed", "num_blocks", "sampled")


def random_plan(rng: np.random.Generator, at: RequestTable):
    """Mostly what an engine would send; one row in a few is wrong in some way."""
    runs, admissions, released = [], [], []
    for slot in range(SLOTS):
        if not at.active[slot]:
            if rng.random() < 0.6:
                length = int(rng.integers(1, 30))
                state = SamplingState(presence_penalty=1.0) if rng.random() < 0.1 else GREEDY
                blocks = rng.integers(0, BLOCKS, -(-length // BLOCK))
                admissions.append(
                    admission(slot, rng.integers(0, VOCAB, length).tolist(), blocks.tolist(), sampling=state)
                )
                if rng.random() < 0.9:
                    runs.append(Run(slot, int(rng.integers(1, length + 1))))
            continue
        if rng.random() < 0.05:
            released.append(slot)
            continue
        left = int(at.length[slot] - at.computed[slot])
        count, last = (int(rng.integers(1, left + 1)), NO_TOKEN) if left else (1, int(rng.integers(0, VOCAB)))
        if not left and rng.random() < 0.5:
            last = ON_DEVICE
        accepted, proposed = (), ()
        room = int(at.num_blocks[slot]) * BLOCK - int(at.length[slot])
        if not left and rng.random() < 0.3:
            accepted = tuple(rng.integers(0, VOCAB, int(rng.integers(min(4, room + 1)))).tolist())
        if count >= left and rng.random() < 0.3:
            proposed = tuple(rng.integers(0, VOCAB, int(rng.integers(5))).tolist())
        needed = int(at.computed[slot]) + len(accepted) + count + len(proposed)
        missing = -(-needed // BLOCK) - int(at.num_blocks[slot])
        blocks = tuple(rng.integers(0, BLOCKS, max(missing, 0)).tolist())
        runs.append(Run(slot, count, last, blocks, accepted=accepted, proposed=proposed))
    rng.shuffle(runs)
    if runs and rng.random() < 0.2:
        wrong = int(rng.integers(len(runs)))
        changes = [
            {"slot": SLOTS + 3}, {"slot": runs[0].slot}, {"count": 0}, {"count": 99}, {"last": VOCAB}, {"last": -7},
            {"blocks": (BLOCKS,)}, {"blocks": (-1,)}, {"blocks": ()}, {"blocks": (1, 2, 3)}, {"accepted": (VOCAB,)},
            {"accepted": (1,)}, {"accepted": (1,) * 40}, {"proposed": (2, -1)}, {"proposed": (1,) * 40},
        ]  # fmt: skip
        runs[wrong] = dataclasses.replace(runs[wrong], **changes[rng.integers(len(changes))])
    return plan(runs, admit=admissions, release=released)


def outcome(at: RequestTable, sent):
    """What a step sees, or the error."""
    try:
        rows = at.apply(sent)
    except ValueError as error:
        return str(error)
    inputs = at.gather(rows) if len(rows.slots) else None
    at.commit(rows)
    return rows, inputs


def as_lists(record):
    return {
        field.name: value.tolist() if isinstance(value := getattr(record, field.name), np.ndarray) else value
        for field in dataclasses.fields(record)
    }


@pytest.mark.parametrize("seed", range(20))
def test_native_and_twin_change_the_table_alike(seed, monkeypatch):
    rng = np.random.default_rng(seed)
    native = request_rows.native
    native_steps = 0
    mine, theirs = (
        RequestTable(slots=SLOTS, max_model_len=LONGEST, block_size=BLOCK, blocks=BLOCKS, vocab_size=VOCAB)
        for _ in range(2)
    )
    for _ in range(400):
        sent = random_plan(rng, theirs)
        results = []
        for at, library in ((mine, native), (theirs, lambda: None)):
            monkeypatch.setattr(request_rows, "native", library)
            results.append(outcome(at, sent))
        native_steps += mine._view is not None
        if isinstance(results[1], str):
            assert results[0] == results[1]
        else:
            for got, want in zip(*results, strict=True):
                assert (got is None) == (want is None) and (got is None or as_lists(got) == as_lists(want))
            rows = results[1][0]
            tokens = rng.integers(0, VOCAB, len(rows.slots))
            for at in (mine, theirs):
                at.keep_sampled(rows.slots, tokens)
        for name in COLUMNS:
            assert np.array_equal(getattr(mine, name), getattr(theirs, name)), name
        for slot in np.flatnonzero(theirs.active).tolist():
            assert (
                mine.tokens[slot, : mine.length[slot]].tolist() == theirs.tokens[slot, : theirs.length[slot]].tolist()
            )
            used = slice(0, int(theirs.num_blocks[slot]))
            assert mine.block_table[slot, used].tolist() == theirs.block_table[slot, used].tolist()
    assert native_steps > 50


def test_arrays_that_do_not_fit_are_refused():
    at = RequestTable(slots=SLOTS, max_model_len=LONGEST, block_size=BLOCK, blocks=BLOCKS, vocab_size=VOCAB)
    good = {
        "active": at.active, "penalised": at.sampling.penalised, "tokens": at.tokens, "length": at.length,
        "num_prompt": at.num_prompt, "computed": at.computed, "block_table": at.block_table,
        "num_blocks": at.num_blocks, "sampled": at.sampled, "max_length": LONGEST, "block_size": BLOCK,
        "blocks": BLOCKS, "vocab_size": VOCAB,
    }  # fmt: skip
    TableView(**good)
    for name in ("active", "length", "sampled", "tokens", "block_table"):
        for wrong in (good[name][:-1], good[name].astype(np.float32), np.stack([good[name]] * 2, -1)[..., 0]):
            with pytest.raises(ValueError, match="table"):
                TableView(**good | {name: wrong})
