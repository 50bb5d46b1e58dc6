"""The only model class: builds itself from a `DecoderSpec`, for one rank's place in a mesh, and computes one step.

A rank holds the layers of its pipeline stage (the first stage also the token table, the last the head) and its share
of their heads, inner width and vocabulary. With a mesh of one everything is whole. Knows no family and no checkpoint.

Layers call each other's `forward`, not the module: nothing hooks them, and a step makes hundreds of such calls. Where
all of a block's computation is native it is recorded with the first step, and played from then on (`models.tapes`).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import replace

import torch

from phalanx.attention.base import AttentionBackend, LayerCache, StepLayout
from phalanx.distributed.collectives import Groups
from phalanx.distributed.mesh import Mesh
from phalanx.distributed.partition import Partition
from phalanx.distributed.pulse import Pulse
from phalanx.kernels.tape import DELTA, NORMED, STREAM, CannotRecord, Tape
from phalanx.kernels.weight_memory import WeightMemory
from phalanx.layers.embedding import PositionTable, VocabularyTable
from phalanx.layers.layer import Layer
from phalanx.layers.linear import LinearContext, ReplicatedLinear
from phalanx.layers.weights import Loadable
from phalanx.models.blocks import BlockContext, Step, make_block, make_norm
from phalanx.models.decoding import Decoding
from phalanx.models.rope import make_rotary
from phalanx.models.spec import DecoderSpec
from phalanx.models.split import Split
from phalanx.models.tapes import Tapes, record
from phalanx.quantization.base import Scheme, Unquantized, choose_scheme


class Decoder(Layer):
    """One rank's part of a model. Weights are empty until the loader fills them, or lie in `memory` that is filled."""

    def __init__(
        self, spec: DecoderSpec, mesh: Mesh, rank: int, groups: Groups, dtype: torch.dtype, device: torch.device,
        backend: AttentionBackend, *, scheme: Scheme | None = None, split: Split | None = None,
        memory: WeightMemory | None = None,
    ):  # fmt: skip
        self.spec = spec
        self.place = mesh.place(rank)
        self.dtype = dtype
        self.device = device
        self.backend = backend
        self.groups = groups
        self.pulse = Pulse()
        """Beats with every layer."""
        self.split = split or Split.even(spec, mesh, self.place.pp)
        self.layer_range = self.split.layers.ranges[self.place.pp]
        self.is_first = self.place.pp == 0
        self.is_last = self.place.pp == mesh.pp - 1
        scheme, memory = scheme or choose_scheme(None, dtype, device), memory or WeightMemory(device)
        linear = LinearContext(self.place.tp, groups.tp, scheme, dtype, memory)
        own = spec.layers[slice(*self.layer_range)]
        ropes = list(dict.fromkeys(layer.attention.rope for layer in own if layer.attention.rope is not None))
        context = BlockContext(spec.hidden_size, self.split, backend, linear, ropes)
        self._build_outer(linear)
        self.tapes: Tapes | None = None
        """The blocks in their native form, from the first step on; None where they are computed layer by layer."""
        self._recorded = False
        self.blocks = [make_block(f"layers.{i}", spec.layers[i], context) for i in range(*self.layer_range)]
        self._rotaries = [make_rotary(rope, spec.prompt_classes, dtype, device) for rope in ropes]
        self._log_positions = {p for layer in own if (p := layer.attention.log_positions) is not None}
        scale = spec.embedding.scale
        # The factor is rounded to the weights' type first, as the models that have one were trained.
        self._embedding_scale = None if scale is None else torch.tensor(scale).to(dtype).item()

    def _build_outer(self, linear: LinearContext) -> None:
        spec, embedding, width = self.spec, self.spec.embedding, self.spec.embedding.width

        def table(name: str, bias: bool, *, multiplied: bool) -> VocabularyTable:
            stored = multiplied or linear.scheme.stores_tables
            context = linear if stored else replace(linear, scheme=Unquantized())
            return VocabularyTable(name, self.split.vocabulary(spec), width, context, bias=bias)

        projects = width != spec.hidden_size
        tied_here = self.is_last and spec.tie_embeddings
        needs_table = self.is_first or tied_here
        self.embedding = table("embedding", False, multiplied=tied_here) if needs_table else None
        self.positions = None
        if self.is_first and embedding.positions is not None:
            self.positions = PositionTable(
                "positions", embedding.positions, spec.hidden_size, embedding.position_offset, linear.dtype,
                linear.memory,
            )  # fmt: skip
        self.project_in = None
        if self.is_first and projects:
            self.project_in = ReplicatedLinear("project_in", spec.hidden_size, width, linear)
        self.final_norm = self.project_out = self.head = None
        if self.is_last:
            if spec.final_norm is not None:
                self.final_norm = make_norm("final_norm", spec.final_norm, spec.hidden_size, linear)
            if projects:
                self.project_out = ReplicatedLinear("project_out", width, spec.hidden_size, linear)
            self.head = self.embedding if spec.tie_embeddings else table("head", spec.head_bias, multiplied=True)

    def loadables(self) -> Iterator[Loadable]:
        """Every layer that holds weights, once, in the order of the model."""
        seen: set[int] = set()
        for part in self.parts():
            if hasattr(part, "slots") and id(part) not in seen:
                seen.add(id(part))
                yield part  # type: ignore[misc]

    @property
    def nbytes(self) -> int:
        """Bytes of the weights that this rank holds."""
        return sum(module.nbytes for module in self.loadables())

    def allocate_caches(self, blocks: int, block_size: int, dtype: torch.dtype | None = None) -> list[LayerCache]:
        """One cache per layer of this stage. Those of before are given up."""
        if self.tapes is not None:
            self.tapes.forget_caches()
        return [
            self.backend.allocate(block.attention.shape, blocks, block_size, dtype or self.dtype, self.device)
            for block in self.blocks
        ]

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, caches: list[LayerCache], layout: StepLayout,
        hidden: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """One step over packed tokens: token_ids and positions int64 [T] -> hidden [T, hidden].

        A later pipeline stage takes the stage before's result as `hidden`, which it may overwrite, and ignores
        `token_ids`. The result goes to the next stage, or after the last one, for the rows that are sampled, to
        `logits` or `own_logits`.
        """
        x = self._embed(token_ids, positions) if hidden is None else hidden
        step = self._prepare(positions, layout)
        tapes = self._recording()
        if tapes is not None:
            x, delta = tapes.play(x, caches, step, self.pulse.beat)
        else:
            x, delta = self._compute(x, caches, step)
        return x if delta is None else x.add_(delta)

    def _compute(
        self, x: torch.Tensor, caches: list[LayerCache], step: Step
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        delta: torch.Tensor | None = None
        for block, cache in zip(self.blocks, caches, strict=True):
            x, delta = block.forward(x, delta, cache, step)
            self.pulse.beat()
        return x, delta

    def decoding(self, caches: list[LayerCache]) -> Decoding | None:
        """The steps in which each request has one token to compute; None where they are no other than all steps."""
        spec = self.spec
        outside: list[object] = [self.project_in, self.positions, self.project_out]
        outside += [self._embedding_scale] * self.is_first + [spec.logit_soft_cap] * self.is_last
        if any(part is not None for part in outside):
            return None
        tapes = self._recording()
        if tapes is None or self._log_positions or not all(rotary.one_class for rotary in self._rotaries):
            return None
        start, stop = self.own_tokens if self.is_last else (0, 0)
        try:
            first, last = Tape(self.dtype, spec.hidden_size), Tape(self.dtype, spec.hidden_size, logits=stop - start)
            if self.is_first and self.embedding is not None:
                self.embedding.record_embed(first)
            if self.final_norm is not None:
                self.final_norm.record(last, STREAM, DELTA, NORMED)
            if self.head is not None:
                self.head.record_logits(last, STREAM if self.final_norm is None else NORMED)
            return Decoding(tapes, first, last, caches, self._rotaries, start, self.pulse)
        except CannotRecord:
            return None

    def _recording(self) -> Tapes | None:
        if not self._recorded:  # the weights are there by now
            self.tapes, self._recorded = record(self.blocks, self.groups.tp), True
        return self.tapes

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, hidden] of the last stage -> float32 [R, vocabulary], on every tensor rank."""
        return self._head().whole(self.own_logits(hidden))

    def own_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, hidden] of the last stage -> float32 [R, tokens of `own_tokens`]."""
        head = self._head()
        self.pulse.beat()
        if self.final_norm is not None:
            hidden = self.final_norm.forward(hidden)
        if self.project_out is not None:
            hidden = self.project_out.forward(hidden)
        logits = head.logits(hidden)
        cap = self.spec.logit_soft_cap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    @property
    def vocabulary(self) -> Partition:
        """Which tensor rank has the logits of which tokens."""
        return self.split.vocabulary(self.spec)

    @property
    def own_tokens(self) -> tuple[int, int]:
        """The tokens whose logits this rank computes, where it is of the last stage."""
        return self.vocabulary.ranges[self.place.tp]

    def _head(self) -> VocabularyTable:
        if self.head is None:
            raise ValueError("only the last pipeline stage has an output head")
        return self.head

    def _embed(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        if self.embedding is None:
            raise ValueError("only the first pipeline stage has a token table")
        x = self.embedding.embed(token_ids)
        if self._embedding_scale is not None:
            x *= self._embedding_scale
        if self.project_in is not None:
            x = self.project_in.forward(x)
        if self.positions is not None:
            x += self.positions.forward(positions)
        return x

    def _prepare(self, positions: torch.Tensor, layout: StepLayout) -> Step:
        classes = self._prompt_classes(layout)
        factors = {}
        for trained in self._log_positions:
            factor = (torch.log(positions.float() + 1) / math.log(trained)).clamp_(min=1.0)
            factors[trained] = factor.to(self.dtype)[:, None, None]
        turns = [rotary.turn(positions, classes) for rotary in self._rotaries]
        return Step(layout, self.backend.plan(layout), turns, factors)

    def _prompt_classes(self, layout: StepLayout) -> torch.Tensor | None:
        limits = self.spec.prompt_classes
        if not limits or layout.prompt_lens is None:
            return None
        rows = [bisect_left(limits, length) for length in layout.prompt_lens]
        if not any(rows):
            return None
        counts = [b - a for a, b in zip(layout.query_start, layout.query_start[1:], strict=False)]
        return torch.repeat_interleave(torch.tensor(rows), torch.tensor(counts)).to(self.device)
