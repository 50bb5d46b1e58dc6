"""One engine in a process of its own, for `peers.py`: a JSON line in (a workload), a JSON line out (seconds, tokens).

    python peer_engines.py ENGINE MODEL

Runs in the environment of the engine it names and imports nothing but that. Each does the same work: distinct random
prompts, greedy answers of an exact length, end-of-text ignored.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

LEAST_TOKEN, MOST_TOKEN = 100, 40_000


def prompts(count: int, length: int, seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randint(LEAST_TOKEN, MOST_TOKEN) for _ in range(length)] for _ in range(count)]


class Engine(Protocol):
    def generate(self, prompts: list[list[int]], output_len: int) -> int:
        """Answer all; the number of tokens in the answers."""
        ...


class Phalanx:
    """`LLM`, with the default settings: what the checkpoint holds is computed as it is."""

    def __init__(self, model: str, **options: Any):
        from phalanx import LLM

        self._llm = LLM(model, max_model_len=8192, kv_cache_memory_bytes="1G", **options)

    def generate(self, prompts: list[list[int]], output_len: int) -> int:
        from phalanx import SamplingParams

        params = SamplingParams(max_tokens=output_len, temperature=0, ignore_eos=True)
        return sum(len(answer.outputs[0].token_ids) for answer in self._llm.generate(prompts, params))


class Transformers:
    def __init__(self, model: str):
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(len(os.sched_getaffinity(0)))
        self._torch = torch
        loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
        self._model = loaded.eval()

    def generate(self, prompts: list[list[int]], output_len: int) -> int:
        ids = self._torch.tensor(prompts)
        with self._torch.inference_mode():
            out = self._model.generate(
                input_ids=ids, attention_mask=self._torch.ones_like(ids), max_new_tokens=output_len,
                min_new_tokens=output_len, do_sample=False,
            )  # fmt: skip
        return int((out.shape[1] - ids.shape[1]) * len(prompts))


class Vllm:
    def __init__(self, model: str):
        cores = sorted(os.sched_getaffinity(0))
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"{cores[0]}-{cores[-1]}")  # as it comes it takes one core
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        from vllm import LLM

        self._llm = LLM(model, dtype="bfloat16", max_model_len=8192, enable_prefix_caching=False)

    def generate(self, prompts: list[list[int]], output_len: int) -> int:
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=output_len, temperature=0, ignore_eos=True)
        answers = self._llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return sum(len(answer.outputs[0].token_ids) for answer in answers)


class LlamaCpp:
    """By the C interface, so that many sequences share a batch. The tokens that it goes on with are drawn, not
    sampled, which is less work than the others do."""

    SEQUENCES, BATCH = 64, 512

    def __init__(self, model: str):
        import llama_cpp

        self._api = llama_cpp
        llama_cpp.llama_backend_init()
        weights = llama_cpp.llama_model_load_from_file(model.encode(), llama_cpp.llama_model_default_params())
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max = self.SEQUENCES * 256, self.SEQUENCES
        params.n_batch = params.n_ubatch = self.BATCH
        params.n_threads = params.n_threads_batch = len(os.sched_getaffinity(0))
        params.kv_unified = True
        self._context = llama_cpp.llama_init_from_model(weights, params)
        self._batch = llama_cpp.llama_batch_init(self.BATCH, 0, 1)
        self._draw = random.Random(0)

    def _add(self, token: int, position: int, sequence: int, wanted: bool) -> None:
        batch, i = self._batch, self._batch.n_tokens
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, wanted
        batch.seq_id[i][0] = sequence
        batch.n_tokens += 1
        if batch.n_tokens == self.BATCH:
            self._compute()

    def _compute(self) -> None:
        if self._batch.n_tokens and self._api.llama_decode(self._context, self._batch) != 0:
            raise RuntimeError("llama_decode failed")
        self._batch.n_tokens = 0

    def generate(self, prompts: list[list[int]], output_len: int) -> int:
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), True)
        for sequence, prompt in enumerate(prompts):
            for position, token in enumerate(prompt):
                self._add(token, position, sequence, position == len(prompt) - 1)
        self._compute()
        for step in range(output_len - 1):
            for sequence, prompt in enumerate(prompts):
                self._add(self._draw.randint(LEAST_TOKEN, MOST_TOKEN), len(prompt) + step, sequence, True)
            self._compute()
        self._api.llama_synchronize(self._context)
        return len(prompts) * output_len


class OpenVino:
    def __init__(self, model: str):
        import openvino_genai

        self._genai = openvino_genai
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size, scheduler.enable_prefix_caching = 1, False
        self._pipe = openvino_genai.LLMPipeline(model, "CPU", scheduler_config=scheduler)

    def generate(self, prompts: list[list[int]], output_len: int) -> int:
        import numpy as np
        import openvino

        config = self._genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = output_len, True, False
        ids = np.array(prompts, dtype="int64")
        inputs = self._genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        return sum(len(tokens) for tokens in self._pipe.generate(inputs, config).tokens)


class Limits:
    """Not an engine: what the machine gives now. A "token" here is a gigabyte read, or a GFLOP in bfloat16."""

    def __init__(self, model: str):
        import torch

        del model
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        self._large = torch.zeros(1 << 27, dtype=torch.float32)
        self._square = torch.randn(2048, 2048).bfloat16()

    def generate(self, prompts: list[list[int]], output_len: int) -> int:
        """With one prompt the memory, with more the products."""
        if len(prompts) == 1:
            self._large.sum()
        else:
            for _ in range(output_len):
                self._square @ self._square
        return len(prompts) * output_len


ENGINES: dict[str, Callable[[str], Engine]] = {
    "phalanx": Phalanx,
    "phalanx expanded": partial(Phalanx, quantization="none"),
    "transformers": Transformers,
    "vllm": Vllm,
    "llama.cpp": LlamaCpp,
    "openvino": OpenVino,
    "limits": Limits,
}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a library prints must not get between the answers
    began = time.perf_counter()
    engine = ENGINES[sys.argv[1]](sys.argv[2])
    engine.generate(prompts(1, 16, 0), 1)
    print(json.dumps({"ready_s": time.perf_counter() - began}), file=answers)
    for line in sys.stdin:
        order = json.loads(line)
        asked = prompts(order["count"], order["input_len"], order["seed"])
        began = time.perf_counter()
        tokens = engine.generate(asked, order["output_len"])
        print(json.dumps({"seconds": time.perf_counter() - began, "tokens": tokens}), file=answers)


if __name__ == "__main__":
    main()
