"""A model cut over several ranks gives the logits of one rank: tensor ranks (uneven too) and pipeline stages.

The ranks are threads of this process, and the group a lock-step one of the tests; the shards are the real ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.checkpoint.locate import locate
from phalanx.distributed.collectives import Groups, SingleGroup
from phalanx.distributed.mesh import Mesh
from phalanx.distributed.partition import Partition
from phalanx.errors import ConfigError
from phalanx.models.registry import read_spec
from phalanx.models.split import Split
from phalanx.quantization.base import Unquantized
from tests.helpers.decoders import decoder_of, random_ids
from tests.helpers.lockstep import LockstepGroup, run_ranks
from tests.helpers.stepping import Driver, layout_of
from tests.helpers.tiny_models import FAMILIES, tiny_checkpoint


def whole_logits(path: Path, ids: list[int]) -> torch.Tensor:
    driver = Driver(decoder_of(path))
    return driver.prefill(driver.stream(ids))


def split_logits(
    path: Path, ids: list[int], ranks: int, weights: tuple[float, ...] | None = None
) -> list[torch.Tensor]:
    spec = read_spec(locate(str(path)).config)
    split = None if weights is None else Split(Partition.whole(spec.num_layers), weights)

    def body(group: LockstepGroup) -> torch.Tensor:
        decoder = decoder_of(path, mesh=Mesh(tp=ranks), rank=group.rank, groups=Groups(tp=group), split=split)
        driver = Driver(decoder)
        return driver.prefill(driver.stream(ids), [11, 1, 8])

    return run_ranks(ranks, body)


@pytest.mark.parametrize("ranks", [4])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_tensor_ranks(family: str, ranks: int) -> None:
    overrides: dict[str, Any] = {"num_attention_heads": 4, "hidden_size": 64} if ranks == 4 and family in (
        "qwen2", "qwen1", "opt", "opt-post-norm", "phi3"
    ) else {}  # fmt: skip
    path = tiny_checkpoint(family, **overrides)
    ids = random_ids(29)
    expected = whole_logits(path, ids)
    for logits in split_logits(path, ids, ranks):
        assert (logits - expected).abs().max() < 1e-4


@pytest.mark.parametrize("weights", [(1, 3), (5, 1, 2)])
def test_weighted_tensor_ranks(weights: tuple[float, ...]) -> None:
    path = tiny_checkpoint("llama")
    ids = random_ids(29)
    for logits in split_logits(path, ids, len(weights), weights):
        assert (logits - whole_logits(path, ids)).abs().max() < 1e-4


def test_nine_heads_over_two_ranks() -> None:
    """5 + 4 query heads in groups of 3: both ranks hold the KV head that both need, and groups are unequal."""
    spec = read_spec(locate(str(tiny_checkpoint("llama"))).config)
    split, attention = Split.even(spec, Mesh(tp=2)), spec.layers[0].attention
    assert split.heads(attention).ranges == ((0, 5), (5, 9))
    assert split.kv_heads(attention).ranges == ((0, 2), (1, 3))
    assert split.kv_head_map(attention, 0) == (0, 0, 0, 1, 1)
    assert split.kv_head_map(attention, 1) == (0, 1, 1, 1)


def test_every_weight_is_on_some_rank_and_only_kv_heads_are_doubled() -> None:
    path = tiny_checkpoint("llama", tie_word_embeddings=False)
    mesh = Mesh(tp=2)
    rows: dict[str, int] = {}
    for rank in range(2):
        groups = Groups(tp=SingleGroupOfTwo(rank))
        decoder = decoder_of(path, mesh=mesh, rank=rank, groups=groups, scheme=Unquantized())
        for module in decoder.loadables():
            for slot in module.slots():
                rows[slot.name] = rows.get(slot.name, 0) + slot.target.numel()
    spec = read_spec(locate(str(path)).config)
    for name, weight in spec.tensors.items():
        whole = torch.Size(weight.shape).numel()
        doubled = name.endswith(("norm.weight", "attention.k.weight", "attention.v.weight"))
        assert rows[name] > whole if doubled else rows[name] == whole, name


class SingleGroupOfTwo(SingleGroup):
    """For building shards that never talk."""

    size = 2

    def __init__(self, rank: int):
        self.rank = rank


STAGES = [Partition.even(4, 2), Partition(4, ((0, 1), (1, 2), (2, 4))), Partition(4, ((0, 3), (3, 4)))]


@pytest.mark.parametrize("stages", STAGES, ids=lambda p: str(p.lengths))
@pytest.mark.parametrize("family", ["gemma3", "llama", "opt-post-norm"])
def test_pipeline_stages(family: str, stages: Partition) -> None:
    """The first stage embeds, the last has the head (a tied table is on both), and the hidden state is passed on."""
    path = tiny_checkpoint(family, num_hidden_layers=4)
    ids = random_ids(21)
    mesh, expected = Mesh(pp=stages.ranks), whole_logits(path, ids)

    def body(group: LockstepGroup) -> torch.Tensor | None:
        split = Split(stages, (1.0,))
        decoder = decoder_of(path, mesh=mesh, rank=group.rank, groups=Groups(pp=group), split=split)
        assert len(decoder.blocks) == stages.length(group.rank)
        caches = decoder.allocate_caches(16, 4)
        stream = Driver(decoder, blocks=16).stream(ids)
        out = []
        for count in (9, 1, 11):
            token_ids, positions, layout = layout_of([stream], [count], 4)
            shape = (count, decoder.spec.hidden_size)
            hidden = None if decoder.is_first else group.recv(shape, torch.float32, group.rank - 1)
            with torch.inference_mode():
                hidden = decoder(token_ids, positions, caches, layout, hidden)
                if decoder.is_last:
                    out.append(decoder.logits(hidden))
                else:
                    group.send(hidden, group.rank + 1)
            stream.computed += count
        return torch.cat(out) if out else None

    logits = run_ranks(stages.ranks, body)[-1]
    assert logits is not None and (logits - expected).abs().max() < 1e-4


def test_too_many_ranks() -> None:
    spec = read_spec(locate(str(tiny_checkpoint("llama"))).config)
    with pytest.raises(ConfigError, match="10 tensor ranks cannot share 9 attention heads"):
        Split.even(spec, Mesh(tp=10))
    with pytest.raises(ConfigError, match="3 pipeline stages"):
        Split.even(spec, Mesh(pp=3))


def test_lockstep_group_follows_the_protocol() -> None:
    """What the tests' group does is what `Group` promises, so that the models above are tested with the right thing."""

    def body(group: LockstepGroup) -> list[torch.Tensor]:
        mine = torch.arange(6).view(2, 3) + 10 * group.rank
        lengths = [2, 3, 1]
        part = mine.new_full((lengths[group.rank], 2), group.rank)
        sent = [torch.full((group.rank + 1, to + 1), group.rank * 10 + to) for to in range(3)]
        return [
            group.all_reduce(mine), group.all_gather(part, 0, lengths),
            group.reduce_scatter(torch.ones(6, 2), 0, lengths), group.broadcast(mine, 1), 
            *group.all_to_all(sent, [(source + 1, group.rank + 1) for source in range(3)]),
        ]  # fmt: skip

    for rank, (total, gathered, scattered, copied, *swapped) in enumerate(run_ranks(3, body)):
        assert torch.equal(total, torch.arange(6).view(2, 3) * 3 + 30)
        assert gathered[:, 0].tolist() == [0, 0, 1, 1, 1, 2]
        assert scattered.shape == ([2, 3, 1][rank], 2) and (scattered == 3).all()
        assert torch.equal(copied, torch.arange(6).view(2, 3) + 10)
        assert [int(t[0, 0]) for t in swapped] == [rank, 10 + rank, 20 + rank]


def test_single_group_is_the_identity() -> None:
    group, tensor = SingleGroup(), torch.randn(3, 2)
    assert group.all_reduce(tensor) is tensor and group.all_gather(tensor, 0, [3]) is tensor
    assert group.reduce_scatter(tensor, 0, [3]) is tensor and group.broadcast(tensor, 0) is tensor
    assert group.all_to_all([tensor], [(3, 2)])[0] is tensor
    group.barrier()
    with pytest.raises(ValueError, match="nobody"):
        group.send(tensor, 0)
    with pytest.raises(ValueError, match="nobody"):
        group.recv((1,), torch.float32, 0)
