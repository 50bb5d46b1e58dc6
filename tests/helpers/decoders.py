"""Loads decoders for tests, and Hugging Face's models to compare them with."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch

from phalanx.attention.registry import choose
from phalanx.checkpoint.locate import locate
from phalanx.distributed.collectives import Groups
from phalanx.distributed.mesh import Mesh
from phalanx.loading.loader import load_decoder
from phalanx.models.decoder import Decoder
from phalanx.models.registry import read_spec
from tests.helpers.qwen1_reference import Qwen1Reference


def decoder_of(
    path: Path, *, mesh: Mesh | None = None, rank: int = 0, groups: Groups | None = None,
    attention: str | None = None, dtype: torch.dtype = torch.float32, **options: Any,
) -> Decoder:  # fmt: skip
    checkpoint = locate(str(path))
    backend = choose("cpu", attention, dtype=str(dtype).removeprefix("torch."))
    return load_decoder(
        checkpoint, read_spec(checkpoint.config), mesh=mesh or Mesh(), rank=rank, groups=groups or Groups(),
        dtype=dtype, device=torch.device("cpu"), backend=backend, **options,
    )  # fmt: skip


class HuggingFace:
    """The reference: transformers' own class, in float32, with attention spelled out."""

    def __init__(self, path: Path):
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
        self.model.generation_config.eos_token_id = None

    def logits(self, ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return self.model(torch.tensor([ids])).logits[0]

    def greedy(self, ids: list[int], count: int) -> list[int]:
        from transformers import GenerationConfig

        settings = GenerationConfig(max_new_tokens=count, do_sample=False, pad_token_id=0)
        with torch.inference_mode():
            given = torch.tensor([ids])
            out = self.model.generate(given, attention_mask=torch.ones_like(given), generation_config=settings)
        return out[0, len(ids) :].tolist()


@cache
def reference(path: Path) -> HuggingFace | Qwen1Reference:
    return Qwen1Reference(path) if path.name.startswith("qwen1") else HuggingFace(path)


def random_ids(count: int, vocab: int = 307, seed: int = 0) -> list[int]:
    return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
