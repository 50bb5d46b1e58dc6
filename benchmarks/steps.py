"""What a step of one stream spends outside native code, with the demo model as its file has it.

    python benchmarks/steps.py --threads 2,1 --rounds 5 --json result.json

`LLM` in this process. A step is from one native beginning of a step to the next: planning, taking in results, turning
tokens into text and the caller's loop are in it. Inside is the time of the native calls themselves; what turns Python's
arguments into theirs is outside. Figures are medians of the steps of an answer, then of the answers.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import setting, shown, summary, write
from benchmarks.peer_engines import prompts
from phalanx import LLM, SamplingParams

WANTED = 5.0
"""Per cent of a step, at most."""


class Timed:
    """The native object of steps of single tokens, and how long its calls take."""

    def __init__(self, native: Any):
        self._native = native
        self._inside = 0.0
        self.begun: list[tuple[float, float]] = []
        """When each step began, and the time inside until then."""

    def begin(self, *args: Any) -> bool:
        self.begun.append((time.perf_counter(), self._inside))
        return bool(self._call(self._native.begin, args))

    def play(self, *args: Any) -> Any:
        return self._call(self._native.play, args)

    def tokens(self) -> bytes:
        found: bytes = self._call(self._native.tokens, ())
        return found

    def _call(self, function: Any, args: tuple[Any, ...]) -> Any:
        began = time.perf_counter()
        result = function(*args)
        self._inside += time.perf_counter() - began
        return result


def measure(threads: int, rounds: int, tokens: int, context: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    step, outside, share = [], [], []
    with LLM(max_model_len=context + tokens, kv_cache_memory_bytes="256M") as llm:
        llm.generate(prompts(1, 8, 0), params, use_tqdm=False)
        steps = llm._engine._executor._worker._runner._decoding._steps  # type: ignore[union-attr]
        native = steps._native
        for number in range(rounds):
            timed = steps._native = Timed(native)
            llm.generate(prompts(1, context, 1 + number), params, use_tqdm=False)
            assert len(timed.begun) == tokens - 1, "a step was not native"
            pairs = [(b - a, (b - a) - (after - before))
                     for (a, before), (b, after) in itertools.pairwise(timed.begun)]  # fmt: skip
            step.append(1e3 * statistics.median(whole for whole, _ in pairs))
            outside.append(1e3 * statistics.median(out for _, out in pairs))
            share.append(1e2 * statistics.median(out / whole for whole, out in pairs))
    return {"threads": threads, "step_ms": summary(step), "outside_ms": summary(outside),
            "outside_percent": {**summary(share), "wanted": WANTED}}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--threads", default="2,1", help="numbers of threads, separated by commas")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=256, help="of an answer")
    parser.add_argument("--context", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    found = [measure(int(threads), args.rounds, args.tokens, args.context) for threads in args.threads.split(",")]
    write({"benchmark": "steps", "tokens": args.tokens, "context": args.context, "by_threads": found, **setting()},
          args.json)  # fmt: skip
    for each in found:
        print(f"{each['threads']} threads: a step {shown(each['step_ms'], 2)} ms, outside "
              f"{shown(each['outside_ms'], 3)} ms, {shown(each['outside_percent'])} %")  # fmt: skip


if __name__ == "__main__":
    main()
