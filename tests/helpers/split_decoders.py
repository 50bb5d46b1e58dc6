"""A model cut over the ranks of a mesh, as threads of this process in lock step: its logits, and tokens it samples.

The shards, the runner with its sampling and the links between stages are the real ones; only the groups are the tests'.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from phalanx.checkpoint.locate import locate
from phalanx.distributed.collectives import Groups
from phalanx.distributed.mesh import Mesh
from phalanx.models.decoder import Decoder
from phalanx.models.registry import read_spec
from phalanx.models.split import Split
from phalanx.step import StepPlan, StepResult
from phalanx.worker.kv_pool import KVPool
from phalanx.worker.model_runner import ModelRunner
from phalanx.worker.request_table import RequestTable
from phalanx.worker.stage_link import StageLink
from tests.helpers.decoders import decoder_of
from tests.helpers.lockstep import run_mesh
from tests.helpers.plans import GREEDY, Run, admission, answer, plan
from tests.helpers.stepping import Driver, layout_of

BLOCKS, BLOCK_SIZE = 64, 4


@dataclass
class RankOutcome:
    decoder: Decoder
    logits: torch.Tensor | None
    """Of the whole prompt; None before the last stage."""
    tokens: list[int]
    """Sampled after the prompt and after each of the tokens told; empty before the last stage."""


def split_outcomes(
    path: Path, mesh: Mesh, ids: Sequence[int], told: Sequence[int] = (), *, chunks: Sequence[int] = (11, 1, 9),
    tensor_weights: Sequence[Sequence[float]] = (), stage_layers: Sequence[int] = (), **options: Any,
) -> list[RankOutcome]:  # fmt: skip
    """Every rank's, for a prompt that is computed in `chunks` (the last repeats). `told` are the tokens that an engine
    would send for the steps after it: those that one rank samples."""
    spec = read_spec(locate(str(path)).config)

    def body(rank: int, groups: Groups) -> RankOutcome:
        place = mesh.place(rank)
        split = Split.of(spec, mesh, place.pp, stage_layers=stage_layers, tensor_weights=tensor_weights)
        decoder = decoder_of(path, mesh=mesh, rank=rank, groups=groups, split=split, **options)
        link = None
        if mesh.pp > 1:
            link = StageLink(groups, place, decoder.spec.hidden_size, decoder.dtype, decoder.device)
        logits = _prompt_logits(decoder, link, ids, pieces(len(ids), chunks))
        runner = make_runner(decoder, link)
        tokens: list[int] = []
        for step in plans_of(ids, told, chunks):
            result = runner.run(step)
            if result is not None:
                tokens += answer(result).tokens.values()
        return RankOutcome(decoder, logits, tokens)

    return run_mesh(mesh, body)


def make_runner(decoder: Decoder, link: StageLink | None = None) -> ModelRunner:
    pool = KVPool(decoder, blocks=BLOCKS, block_size=BLOCK_SIZE, dtype=decoder.dtype)
    table = RequestTable(
        slots=4, max_model_len=BLOCKS * BLOCK_SIZE, block_size=BLOCK_SIZE, blocks=BLOCKS,
        vocab_size=decoder.spec.vocab_size, own_tokens=decoder.own_tokens,
    )  # fmt: skip
    return ModelRunner(decoder, pool, table, decoder.device, link)


def pieces(count: int, chunks: Sequence[int]) -> list[int]:
    """`count` tokens in pieces of these sizes; the last size repeats."""
    sizes, out = list(chunks), []
    while count:
        out.append(min(count, sizes.pop(0) if len(sizes) > 1 else sizes[0]))
        count -= out[-1]
    return out


def plans_of(
    ids: Sequence[int], told: Sequence[int] = (), chunks: Sequence[int] = (1 << 15,), *, block_size: int = BLOCK_SIZE,
    epoch: int = 0,
) -> list[StepPlan]:  # fmt: skip
    """One greedy request: its prompt in chunks, and then a step for each token told."""
    blocks = list(range(-(-(len(ids) + len(told)) // block_size)))
    admit = [admission(0, ids, blocks, sampling=GREEDY)]
    prompt = pieces(len(ids), chunks)
    first = [plan([Run(0, n)], admit=[] if i else admit, epoch=epoch) for i, n in enumerate(prompt)]
    return first + [plan([Run(0, 1, token)], epoch=epoch) for token in told]


def greedy(run: Callable[[StepPlan], StepResult | None], ids: Sequence[int], count: int, **options: Any) -> list[int]:
    """`count` greedy tokens after a prompt, from whatever runs plans. Uses slot 0 and releases it."""
    plans = plans_of(ids, [0] * (count - 1), **options)
    out: list[int] = []
    for step in plans[: len(plans) - count + 1]:
        result = run(step)
    for _ in range(count):
        if result is None:
            raise AssertionError("no result")
        out.append(answer(result).tokens[0])
        if len(out) < count:
            result = run(plan([Run(0, 1, out[-1])], epoch=options.get("epoch", 0)))
    run(plan(release=[0], epoch=options.get("epoch", 0)))
    return out


@torch.inference_mode()
def _prompt_logits(
    decoder: Decoder, link: StageLink | None, ids: Sequence[int], counts: Sequence[int]
) -> torch.Tensor | None:
    driver = Driver(decoder, BLOCKS, BLOCK_SIZE)
    stream, out = driver.stream(ids), []
    for count in counts:
        token_ids, positions, layout = layout_of([stream], [count], BLOCK_SIZE)
        before = link.receive(count) if link is not None and not decoder.is_first else None
        hidden = decoder(token_ids, positions, driver.caches, layout, before)
        if decoder.is_last:
            out.append(decoder.logits(hidden))
        elif link is not None:
            link.send(hidden)
        stream.computed += count
    return torch.cat(out) if out else None
