"""Proposed tokens (`--speculative-config`) against none: work that quotes its prompt, and work that does not.

    python benchmarks/speculation.py --rounds 5 --json result.json

Two engines with the demo model, each with a process of its own, do the same work in turn, in a round both, in turns the
first; ratios are taken within the round. The tokens must be equal, and are compared. Figures are tokens a second after
the first ones. In `edit`, `summary` and `recite` the answer repeats much of the prompt; `story` and `random` are for
what proposing costs where little or nothing comes true.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import ROOT, setting, shown, summary, write
from benchmarks.peer_engines import prompts
from phalanx import AsyncEngine, EngineConfig, SamplingParams

CONFIG = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}


@dataclass(frozen=True)
class Work:
    """`requests` at once. Without an instruction the prompts are random tokens."""

    instruction: str
    requests: int
    output_len: int
    temperature: float = 0.0
    input_len: int = 128


_CODE = '''
class Basket:
    """What a customer wants to buy."""

    def __init__(self, customer):
        self.customer = customer
        self.items = []

    def add(self, name, price, count=1):
        """Put an item into the basket."""
        self.items.append((name, price, count))

    def remove(self, name):
        """Take an item out of the basket."""
        self.items = [item for item in self.items if item[0] != name]

    def total(self):
        """The price of all items."""
        return sum(price * count for name, price, count in self.items)

    def show(self):
        """Print the basket."""
        print(f"Basket of {self.customer}")
        for name, price, count in self.items:
            print(f"{count} x {name}: {price:.2f}")
        print(f"Total: {self.total():.2f}")
'''
_REPORT = (
    "The lighthouse on the northern cape was built in 1851. It stands on a rock of granite, forty metres above the "
    "sea. For more than a hundred years a keeper and his family lived in the house beside it. Every evening the "
    "keeper climbed the stairs, lit the lamp and wound up the clockwork that turned the lens. In 1968 the lamp was "
    "replaced by an electric one, and the last keeper left the cape. The house was empty for twenty years. In 1990 "
    "the town bought it and made it a museum, which has about nine thousand visitors a year. The museum shows the "
    "old lens, the clockwork and the diaries of the keepers. This spring a storm damaged the roof, and the museum "
    "had to close. The town now asks for donations to repair it before winter."
)
_TEXT = (ROOT / "docs" / "index.md").read_text() + (ROOT / "docs" / "kernels.md").read_text()[:2400]
WORK = {
    "edit": Work(f"```python{_CODE}```\nAdd type hints. Answer with the whole file and nothing else.", 1, 240),
    "summary": Work(f"{_REPORT}\n\nSummarize the text above.", 1, 128),
    "recite": Work(f"{_TEXT}\n\nRepeat the text above from its beginning, word by word.", 1, 256),
    "story": Work("Tell a long story about a lighthouse keeper and the sea.", 1, 256, temperature=1.0),
    "random": Work("", 1, 128),
    "story8": Work("Tell a long story about a lighthouse keeper and the sea.", 8, 128, temperature=1.0),
    "random8": Work("", 8, 64),
    "random32": Work("", 32, 64),
}
LEAST = {"edit": 1.0, "summary": 1.0, "recite": 1.0}
"""Ratio that is hoped for; 0.97 where it is not named."""


class Side:
    def __init__(self, options: dict[str, Any]):
        self.engine = AsyncEngine(EngineConfig.from_options(**options))
        self.accepted = self.proposed = 0

    async def run(self, work: Work, seed: int) -> tuple[float, list[list[int]]]:
        """Tokens a second, and the tokens."""
        before = self.engine.status().speculation
        texts = await self._prompts(work, seed)
        answers = await asyncio.gather(*(self._one(text, work, seed + i) for i, text in enumerate(texts)))
        await asyncio.sleep(0.5)  # for the counters
        after = self.engine.status().speculation
        self.accepted += after.accepted_tokens - before.accepted_tokens
        self.proposed += after.draft_tokens - before.draft_tokens
        begin, end = min(first for first, _, _, _ in answers), max(last for _, last, _, _ in answers)
        tokens = [tokens for _, _, _, tokens in answers]
        late = sum(len(tokens) - first for _, _, first, tokens in answers)
        return late / (end - begin), tokens

    async def _prompts(self, work: Work, seed: int) -> list[Any]:
        if not work.instruction:
            return prompts(work.requests, work.input_len, seed)
        messages = [{"role": "user", "content": work.instruction}]
        return [await self.engine.apply_chat_template(messages)] * work.requests

    async def _one(self, prompt: Any, work: Work, seed: int) -> tuple[float, float, int, list[int]]:
        """Times of the first and the last tokens, how many the first were, and all."""
        params = SamplingParams(max_tokens=work.output_len, temperature=work.temperature, ignore_eos=True, seed=seed)
        first = last = 0.0
        early, tokens = 0, []
        async for delta in self.engine.generate(prompt, params, cache_salt=str(seed)):
            new = delta.outputs[0].token_ids
            if new:
                last = time.perf_counter()
                tokens += new
                if not first:
                    first, early = last, len(new)
        return first, last, early, tokens


async def measure(rounds: int, works: list[str], config: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    options = {"max_model_len": 2048, "kv_cache_memory_bytes": "512M", **options}
    sides = {"without": Side(options), "with": Side({**options, "speculative_config": config})}
    results: dict[str, Any] = {}
    try:
        for side in sides.values():
            await side.engine.start()
        for name in works:
            rates: dict[str, list[float]] = {each: [] for each in sides}
            sides["with"].accepted = sides["with"].proposed = 0
            for number in range(-1, rounds):  # one that does not count
                answers = {}
                for each in list(sides)[:: 1 if number % 2 else -1]:
                    rate, answers[each] = await sides[each].run(WORK[name], seed=1000 * (number + 1))
                    if number >= 0:
                        rates[each].append(rate)
                if answers["with"] != answers["without"]:
                    raise SystemExit(f"{name}: the tokens differ")
            ratios = [b / a for a, b in zip(rates["without"], rates["with"], strict=True)]
            results[name] = {
                "tok_s": {each: summary(values) for each, values in rates.items()},
                "ratio": {**summary(ratios), "hoped": LEAST.get(name, 0.97)},
                "proposed": sides["with"].proposed,
                "accepted": sides["with"].accepted,
            }
            print(name, shown(results[name]["ratio"], 2), f"{sides['with'].accepted} of {sides['with'].proposed}")
    finally:
        for side in sides.values():
            await side.engine.close()
    return {"benchmark": "speculation", "config": config, "rounds": rounds, "work": results, **setting()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--work", default=",".join(WORK), help="names, separated by commas")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization")
    parser.add_argument("--speculative-config", type=json.loads, default=CONFIG)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    options = {"dtype": args.dtype, "quantization": args.quantization}
    result = asyncio.run(measure(args.rounds, args.work.split(","), args.speculative_config, options))
    write(result, args.json)
    for name, figures in result["work"].items():
        without, with_ = (shown(figures["tok_s"][side]) for side in ("without", "with"))
        share = figures["accepted"] / figures["proposed"] if figures["proposed"] else 0.0
        print(f"{name:<9} {without} -> {with_} tok/s, ratio {shown(figures['ratio'], 2)}, accepted {share:.0%}")


if __name__ == "__main__":
    main()
