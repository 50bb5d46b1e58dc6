"""An independent Qwen 1 in plain PyTorch, written from the published description of the model, one whole prompt at a
time and without any of our layers: transformers has no class for it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from safetensors.torch import load_file


class Qwen1Reference:
    def __init__(self, folder: Path):
        self.config = json.loads((folder / "config.json").read_text())
        self.weights = load_file(folder / "model.safetensors")

    def logits(self, ids: list[int], prompt_length: int | None = None) -> torch.Tensor:
        """[tokens, vocab]. The rotary base is decided by `prompt_length` (default: all tokens), as in the original,
        which sets it in the first call and keeps it while it generates."""
        c, w = self.config, self.weights
        heads, dim, count = c["num_attention_heads"], c["kv_channels"], len(ids)
        cos, sin = self._rotation(count, prompt_length or count, dim)
        causal = torch.full((count, count), -math.inf).triu(1)
        x = w["transformer.wte.weight"][ids]
        for i in range(c["num_hidden_layers"]):
            at = f"transformer.h.{i}."
            h = self._norm(x, w[at + "ln_1.weight"])
            qkv = h @ w[at + "attn.c_attn.weight"].T + w[at + "attn.c_attn.bias"]
            q, k, v = (part.view(count, heads, dim).transpose(0, 1) for part in qkv.chunk(3, -1))
            q, k = self._rotate(q, cos, sin), self._rotate(k, cos, sin)
            if c["use_logn_attn"]:
                q = q * self._log_positions(count)[None, :, None]
            scores = q @ k.transpose(1, 2) / math.sqrt(dim) + causal
            attended = (scores.softmax(-1) @ v).transpose(0, 1).reshape(count, heads * dim)
            x = x + attended @ w[at + "attn.c_proj.weight"].T
            h = self._norm(x, w[at + "ln_2.weight"])
            up, gate = h @ w[at + "mlp.w1.weight"].T, h @ w[at + "mlp.w2.weight"].T
            x = x + (up * gate * torch.sigmoid(gate)) @ w[at + "mlp.c_proj.weight"].T
        x = self._norm(x, w["transformer.ln_f.weight"])
        return x @ w.get("lm_head.weight", w["transformer.wte.weight"]).T

    def greedy(self, ids: list[int], count: int) -> list[int]:
        out = list(ids)
        for _ in range(count):
            out.append(int(self.logits(out, len(ids))[-1].argmax()))
        return out[len(ids) :]

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.config["layer_norm_epsilon"]).sqrt() * weight

    def _rotation(self, count: int, prompt_length: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        alpha = 1.0
        if self.config["use_dynamic_ntk"]:
            alpha = max(2 ** math.ceil(math.log2(prompt_length / self.config["seq_length"]) + 1) - 1, 1)
        base = self.config["rotary_emb_base"] * alpha ** (dim / (dim - 2))
        angles = torch.outer(torch.arange(count).float(), base ** -(torch.arange(0, dim, 2).float() / dim))
        return torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin()

    def _rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    def _log_positions(self, count: int) -> torch.Tensor:
        trained = self.config["seq_length"]
        return torch.tensor([math.log(i, trained) if i > trained else 1.0 for i in range(1, count + 1)])
