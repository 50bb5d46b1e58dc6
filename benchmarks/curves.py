"""Prefill and decode over contexts and batch sizes: does the time grow as the work does, or are there cliffs?

    python benchmarks/curves.py --json result.json

One engine in this process' cores, the demo model. For each context that many streams are begun as fit the token
`--budget`; while all of them run, the time of a step is the median of one stream's last `STEPS` tokens; then half of
the streams is given up, and so on down to one. Prefill is the time of the first one's first token, alone. Beside each
step stands what it has to read, weights once and every stream's context, and how fast that was read.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import setting, write
from phalanx import AsyncEngine, EngineConfig, SamplingParams

CONTEXTS = (128, 1024, 4096, 8000)
MOST = 64
STEPS = 16
MARGIN = 180
"""Tokens of an answer, which stays shorter than this: positions that a context leaves free."""


class Stream:
    """One answer under way; `times` says when its tokens came."""

    def __init__(self, engine: AsyncEngine, prompt: list[int]):
        self.times: list[float] = []
        self._task = asyncio.create_task(self._run(engine, prompt))

    async def _run(self, engine: AsyncEngine, prompt: list[int]) -> None:
        params = SamplingParams(max_tokens=MARGIN, temperature=0, ignore_eos=True)
        async for delta in engine.generate(prompt, params):
            self.times += [time.perf_counter()] * len(delta.outputs[0].token_ids)

    async def has(self, tokens: int) -> None:
        while len(self.times) < tokens:
            if self._task.done():
                self._task.result()
                raise SystemExit(f"a stream ended after {len(self.times)} tokens")
            await asyncio.sleep(0.002)

    async def give_up(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


async def curve(engine: AsyncEngine, context: int, budget: int, weights: int, per_token: int) -> list[dict[str, Any]]:
    randomly = random.Random(context)

    def prompt() -> list[int]:
        return [randomly.randrange(100, 40_000) for _ in range(context)]

    count = max(1, 1 << (min(MOST, budget // context).bit_length() - 1))
    began = time.perf_counter()
    streams = [Stream(engine, prompt())]
    await streams[0].has(1)
    prefill = context / (streams[0].times[0] - began)
    await streams[0].give_up()
    streams = [Stream(engine, prompt()) for _ in range(count)]
    await asyncio.gather(*(stream.has(1) for stream in streams))
    found = []
    last = streams[-1]  # begun last, it has the most tokens left
    while True:
        seen = len(last.times)
        await last.has(seen + 2 + STEPS)  # the first two may have been computed with more beside
        gaps = [b - a for a, b in zip(last.times[seen + 1 : seen + 1 + STEPS], last.times[seen + 2 :], strict=False)]
        step = statistics.median(gaps)
        read = weights + len(streams) * context * per_token
        found.append(
            {
                "context": context,
                "streams": len(streams),
                "step_ms": round(step * 1e3, 2),
                "tok_s": round(len(streams) / step, 1),
                "read_gb_s": round(read / step / 1e9, 1),
                "prefill_tok_s": round(prefill, 1),
            }
        )
        print(found[-1], file=sys.stderr)
        if len(streams) == 1:
            break
        given_up, streams = streams[: len(streams) // 2], streams[len(streams) // 2 :]
        await asyncio.gather(*(stream.give_up() for stream in given_up))
    await last.give_up()
    return found


async def measure(options: dict[str, Any], budget: int) -> dict[str, Any]:
    length = max(CONTEXTS) + MARGIN
    config = EngineConfig.from_options(max_model_len=length, enable_prefix_caching=False, max_num_seqs=MOST, **options)
    async with AsyncEngine(config) as engine:
        info = engine.info
        per_token = info.kv_bytes // info.blocks // info.block_size
        weights = engine.status().workers[0].memory["weights"]
        await curve(engine, CONTEXTS[0], 4 * CONTEXTS[0], weights, per_token)  # warms up
        points = [p for context in CONTEXTS for p in await curve(engine, context, budget, weights, per_token)]
    return {"weights": weights, "kv_bytes_per_token": per_token, "points": points}


def markdown(points: list[dict[str, Any]]) -> str:
    """Milliseconds of a step by streams and context."""
    by = {(point["context"], point["streams"]): point for point in points}
    counts = sorted({streams for _, streams in by})
    rows = [
        "| context | prefill, tok/s | " + " | ".join(f"{n}" for n in counts) + " |",
        "|---:|---:|" + "---:|" * len(counts),
    ]
    for context in sorted({context for context, _ in by}):
        cells = [f"{by[context, n]['step_ms']:.1f}" if (context, n) in by else "" for n in counts]
        rows.append(f"| {context:,} | {by[context, 1]['prefill_tok_s']:,.0f} | {' | '.join(cells)} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--quantization", help="as `phalanx serve` has it; default: weights as they are in the file")
    parser.add_argument("--kv-cache-dtype")
    parser.add_argument("--budget", type=int, default=1 << 17, help="prompt tokens of all streams of a context")
    parser.add_argument("--json")
    args = parser.parse_args()
    options = {name: value for name in ("quantization", "kv_cache_dtype") if (value := getattr(args, name))}
    result = {"benchmark": "curves", **setting(), "options": options, **asyncio.run(measure(options, args.budget))}
    write(result, args.json)
    print(markdown(result["points"]), file=sys.stderr)


if __name__ == "__main__":
    main()
