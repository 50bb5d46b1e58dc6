"""What a rank holds, in numbers, against what a decoder of that rank really has: every family, several layouts."""

import pytest
import torch

from phalanx.attention.registry import choose
from phalanx.checkpoint.locate import locate
from phalanx.distributed.collectives import Groups, SingleGroup
from phalanx.distributed.mesh import Mesh
from phalanx.models.decoder import Decoder
from phalanx.models.registry import read_spec
from phalanx.models.shares import kv_bytes_per_token, weight_bytes
from phalanx.models.split import Split
from phalanx.worker.kv_pool import KVPool
from tests.helpers.tiny_models import FAMILIES, tiny_checkpoint

LAYOUTS = {
    "one": (Mesh(), (), ()),
    "tp2": (Mesh(tp=2), (), ()),
    "tp3": (Mesh(tp=3), (), ()),
    "tp2 uneven": (Mesh(tp=2), ((3.0, 1.0),), ()),
    "pp2": (Mesh(pp=2), (), ()),
    "2+1": (Mesh(pp=2, tp=2, stage_tp=(2, 1)), (), ()),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_each_rank_holds_what_its_share_says(family: str, layout: str) -> None:
    spec = read_spec(locate(str(tiny_checkpoint(family))).config)
    mesh, weights, layers = LAYOUTS[layout]
    for rank in range(mesh.world_size):
        place = mesh.place(rank)
        split = Split.of(spec, mesh, place.pp, stage_layers=layers, tensor_weights=weights)
        for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
            decoder = Decoder(
                spec, mesh, rank, Groups(tp=Several(mesh.widths[place.pp], place.tp)), dtype, torch.device("cpu"),
                choose("cpu"), split=split,
            )  # fmt: skip
            assert decoder.nbytes == weight_bytes(spec, mesh, split, place, name), (rank, name)
            pool = KVPool(decoder, blocks=3, block_size=16, dtype=dtype)
            assert pool.nbytes == 3 * 16 * kv_bytes_per_token(spec, split, place, name), (rank, name)


@pytest.mark.parametrize("family", FAMILIES)
def test_shares_of_one_rank_are_the_whole_model(family: str) -> None:
    spec = read_spec(locate(str(tiny_checkpoint(family))).config)
    split = Split.even(spec, Mesh())
    assert weight_bytes(spec, Mesh(), split, Mesh().place(0), "float32") == spec.weight_bytes("float32")
    assert kv_bytes_per_token(spec, split, Mesh().place(0), "bfloat16") == spec.kv_bytes_per_token("bfloat16")


class Several(SingleGroup):
    """A group that exchanges nothing; decoders are only built here, not run."""

    def __init__(self, size: int, rank: int):
        super().__init__()
        self.size, self.rank = size, rank
