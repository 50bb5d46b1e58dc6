"""Short ways to write the plans that an engine would send."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from phalanx.step import NO_TOKEN, Admission, Rows, SamplingState, StepPlan, StepResult, TokenLogprobs, pack, unpack
from tests.helpers.sampling import pack_mask

GREEDY = SamplingState(temperature=0.0)


def admission(
    slot: int,
    tokens: Sequence[int],
    blocks: Sequence[int],
    *,
    num_prompt: int | None = None,
    num_computed: int = 0,
    sampling: SamplingState = GREEDY,
) -> Admission:
    return Admission(
        slot=slot,
        tokens=pack(tokens),
        num_prompt=len(tokens) if num_prompt is None else num_prompt,
        num_computed=num_computed,
        blocks=pack(blocks),
        sampling=sampling,
    )


@dataclass
class Run:
    """One row of a plan."""

    slot: int
    count: int = 1
    last: int = NO_TOKEN
    blocks: tuple[int, ...] = ()
    allowed: np.ndarray | Sequence[np.ndarray] | None = None
    """bool [V]: a grammar mask, or one for each token that is sampled."""
    accepted: tuple[int, ...] = ()
    proposed: tuple[int, ...] = ()


def plan(
    runs: Iterable[Run] = (),
    *,
    admit: Iterable[Admission] = (),
    release: Iterable[int] = (),
    epoch: int = 0,
    step: int = 0,
) -> StepPlan:
    runs = list(runs)
    masks = [(i, mask) for i, run in enumerate(runs) if run.allowed is not None for mask in _each(run.allowed)]
    return StepPlan(
        epoch=epoch,
        step_id=step,
        admissions=list(admit),
        rows=Rows(
            slots=pack([run.slot for run in runs], "H"),
            num_tokens=pack([run.count for run in runs], "H"),
            last_tokens=pack([run.last for run in runs]),
            block_rows=pack([i for i, run in enumerate(runs) for _ in run.blocks], "H"),
            new_blocks=pack([block for run in runs for block in run.blocks]),
            accepted_rows=pack([i for i, run in enumerate(runs) for _ in run.accepted], "H"),
            accepted=pack([token for run in runs for token in run.accepted]),
            proposed_rows=pack([i for i, run in enumerate(runs) for _ in run.proposed], "H"),
            proposed=pack([token for run in runs for token in run.proposed]),
        ),
        released=pack(release, "H"),
        mask_rows=pack((i for i, _ in masks), "H"),
        masks=b"".join(pack_mask(mask).tobytes() for _, mask in masks),
    )


def _each(masks: np.ndarray | Sequence[np.ndarray]) -> Sequence[np.ndarray]:
    return [masks] if isinstance(masks, np.ndarray) else masks


@dataclass
class Answer:
    """A result, unpacked."""

    tokens: dict[int, int]
    """The last of each row."""
    logprobs: dict[int, TokenLogprobs]
    failures: dict[int, str]
    prompt_logprobs: dict[int, tuple[int, list[TokenLogprobs]]] = field(default_factory=dict)
    chains: dict[int, list[int]] = field(default_factory=dict)
    """All tokens of each row."""
    chain_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)


def answer(result: StepResult) -> Answer:
    slots, tokens = unpack(result.slots, "H"), unpack(result.tokens)
    if len(slots) != len(tokens):
        raise AssertionError("slots and tokens differ in length")
    chains: dict[int, list[int]] = {}
    for slot, token in zip(slots, tokens, strict=True):
        chains.setdefault(slot, []).append(token)
    return Answer(
        tokens=dict(zip(slots, tokens, strict=True)),
        logprobs={slot: entries[-1] for slot, entries in result.logprobs.items()},
        chains=chains,
        chain_logprobs=result.logprobs,
        failures={failure.slot: failure.message for failure in result.failures},
        prompt_logprobs={entry.slot: (entry.start, entry.entries) for entry in result.prompt_logprobs},
    )
