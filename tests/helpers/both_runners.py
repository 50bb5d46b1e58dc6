"""A model's runner that computes steps of single tokens natively, and one that never does: they must not differ."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np

from phalanx.models.decoder import Decoder
from phalanx.models.decoding import Decoding
from phalanx.step import ON_DEVICE, SamplingState, StepPlan, StepResult
from phalanx.worker.kv_pool import KVPool
from phalanx.worker.model_runner import ModelRunner
from phalanx.worker.request_table import RequestTable
from phalanx.worker.stage_link import StageLink
from tests.helpers.decoders import random_ids
from tests.helpers.plans import GREEDY, Run, admission, answer, plan

BLOCK = 4
WAYS = {
    2: GREEDY,
    0: SamplingState(temperature=0.8, seed=3, choice=2),
    3: SamplingState(temperature=1.3, top_k=9, top_p=0.9, min_p=0.02, seed=2**63 + 5),
}
"""By slot."""

_COLUMNS = ("active", "tokens", "length", "num_prompt", "computed", "block_table", "num_blocks", "sampled")


class Both:
    def __init__(
        self, natively: Decoder, part_by_part: Decoder, *, ways: Mapping[int, SamplingState] = WAYS, slots: int = 4,
        blocks: int = 40, link: StageLink | None = None,
    ):  # fmt: skip
        """Of one rank; the ranks of a group run the same steps. With a `link` between stages plans say all tokens."""
        self.natively = 0
        """Steps."""
        self.ways, self._told = ways, link is not None
        self.runners = [self._runner(decoder, slots, blocks, link) for decoder in (natively, part_by_part)]
        self.runners[1]._recorded = True
        begin = self.runners[0]._decoding_of

        def counted(sent: StepPlan) -> Decoding | None:
            begun = begin(sent)
            self.natively += begun is not None
            return begun

        self.runners[0]._decoding_of = counted  # type: ignore[method-assign]

    @staticmethod
    def _runner(decoder: Decoder, slots: int, blocks: int, link: StageLink | None) -> ModelRunner:
        pool = KVPool(decoder, blocks=blocks, block_size=BLOCK, dtype=decoder.dtype)
        table = RequestTable(
            slots=slots, max_model_len=64, block_size=BLOCK, blocks=blocks, vocab_size=decoder.spec.vocab_size,
            own_tokens=decoder.own_tokens,
        )  # fmt: skip
        return ModelRunner(decoder, pool, table, decoder.device, link)

    def run(self, sent: StepPlan) -> StepResult:
        """The result: an empty one before the last stage."""
        nothing = StepResult(sent.epoch, sent.step_id)
        results = [msgspec.structs.replace(runner.run(sent) or nothing, compute_s=0.0) for runner in self.runners]
        assert results[0] == results[1]
        first, second = (runner.table for runner in self.runners)
        for column in _COLUMNS:
            np.testing.assert_array_equal(getattr(first, column), getattr(second, column), column)
        return results[0]

    def begin(self) -> None:
        """Prompts of 5, 9 and 13 tokens, in blocks that just hold them."""
        for i, (slot, sampling) in enumerate(self.ways.items()):
            length = 5 + 4 * i
            blocks = range(10 * i, 10 * i + -(-length // BLOCK))
            admitted = admission(slot, random_ids(length, seed=i), blocks, sampling=sampling)
            self.run(plan([Run(slot, length)], admit=[admitted]))

    def decode(self, steps: int) -> list[StepResult]:
        """With new blocks where they are needed, and the last tokens by turns left where they are or sent along."""
        results = []
        for step in range(steps):
            table = self.runners[1].table
            said = random_ids(len(self.ways), seed=step)
            runs = []
            for i, slot in enumerate(self.ways):
                length, blocks = int(table.length[slot]), int(table.num_blocks[slot])
                new = (10 * i + blocks,) if length + 1 > blocks * BLOCK else ()
                last = said[i] if self._told else ON_DEVICE if step % 2 else int(table.sampled[slot])
                runs.append(Run(slot, 1, last, new))
            results.append(self.run(plan(runs, step=step)))
        return results

    def speculate(self, most: int = 3) -> list[StepResult]:
        """After `decode`, from the beginning again, with proposed tokens: up to `most` of those that came, and wrong
        ones behind them. The same tokens must come. A request is done when it has all of them."""
        table, rng, results = self.runners[1].table, np.random.default_rng(most), []
        came = {slot: table.produced(slot).tolist() for slot in self.ways}
        self.run(plan(release=self.ways))
        self.begin()
        known = dict.fromkeys(self.ways, 0)
        """Tokens that the runners have been told of."""
        stood: dict[int, int | None] = dict.fromkeys(self.ways)
        """Proposed tokens that did in the step before; None where none were."""
        while True:
            runs, want = [], {}
            for i, slot in enumerate(self.ways):
                tokens, at = came[slot], known[slot] + (stood[slot] or 0)
                left = len(tokens) - at - 2
                if left < 0:
                    continue
                right, wrong = int(rng.integers(min(most, left) + 1)), int(rng.integers(3))
                ahead = tokens[at + 1 : at + 1 + right] + [(tokens[at + 1 + right] + 1) % table.vocab_size] * wrong
                last = ON_DEVICE if stood[slot] is None and not self._told else tokens[at]
                length, blocks = int(table.num_prompt[slot]) + at + 1 + len(ahead), int(table.num_blocks[slot])
                new = tuple(range(10 * i + blocks, 10 * i + max(blocks, -(-length // BLOCK))))
                runs.append(Run(slot, 1, last, new, accepted=tuple(tokens[known[slot] : at]), proposed=tuple(ahead)))
                want[slot] = tokens[at + 1 : at + 2 + right]
                known[slot], stood[slot] = at + 1, right if ahead else None
            if not runs:
                return results
            results.append(self.run(plan(runs, step=len(results))))
            assert self._told or answer(results[-1]).chains == want
