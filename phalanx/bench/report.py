"""Figures of a benchmark: medians with their spread, the machine they were taken on, as JSON and as a table.

Pure: takes measured runs, returns values and text.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import msgspec

from phalanx.bench.workload import Run, Work
from phalanx.engine.client import EngineInfo
from phalanx.metrics.speculation import SpeculationCounts
from phalanx.planner.hardware import Hardware

_FIGURES = {
    "start_s": ("start to first token", "s"),
    "ttft_s": ("time to first token", "s"),
    "prefill_tok_s": ("prefill", "tok/s"),
    "decode_tok_s": ("decode", "tok/s"),
    "e2e_tok_s": ("output, end to end", "tok/s"),
}


def machine(hardware: Hardware) -> dict[str, Any]:
    """The machine, as far as a figure depends on it."""
    return {
        "cpu": hardware.cpu_model,
        "cores": hardware.cores,
        "memory_bytes": hardware.memory_total,
        "native_bfloat16": hardware.native_bfloat16,
        "architecture": hardware.architecture,
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and largest."""
    return {
        "median": round(statistics.median(values), 4),
        "min": round(min(values), 4),
        "max": round(max(values), 4),
    }


def report(
    kind: str, work: Work, runs: Sequence[Run], start_s: float, info: EngineInfo, hardware: Hardware,
    speculation: SpeculationCounts,
) -> dict[str, Any]:  # fmt: skip
    """The JSON object of one benchmark. Each figure is a median over the runs; `spread` has the extremes, `samples`
    every value. Token counts are of one run, those of proposed tokens of all. A figure that does not apply is left
    out."""
    samples: dict[str, list[float]] = {
        "start_s": [start_s],
        "ttft_s": [statistics.median(run.first_tokens) for run in runs],
        "prefill_tok_s": [run.prefill_tok_s for run in runs],
        "decode_tok_s": [rate for run in runs if (rate := run.decode_tok_s) is not None],
        "e2e_tok_s": [run.e2e_tok_s for run in runs],
    }
    if kind == "throughput":  # prompts and answers are computed in the same steps: neither rate can be told apart
        del samples["prefill_tok_s"], samples["decode_tok_s"]
    samples = {name: [round(value, 4) for value in values] for name, values in samples.items() if values}
    return {
        "benchmark": kind,
        "model": info.model,
        "dtype": info.dtype,
        "device": info.device,
        "mesh": info.mesh,
        "runs": len(runs),
        "requests": work.requests,
        "input_len": work.input_len,
        "output_len": work.output_len,
        **{name: round(statistics.median(values), 4) for name, values in samples.items()},
        "prompt_tokens": runs[0].prompt_tokens,
        "output_tokens": runs[0].output_tokens,
        **({"speculation": msgspec.to_builtins(speculation)} if speculation.accepted_at else {}),
        "wall_s": round(statistics.median(run.wall for run in runs), 4),
        "spread": {name: spread(values) for name, values in samples.items()},
        "samples": samples,
        "machine": machine(hardware),
    }


def table(result: dict[str, Any]) -> str:
    """A few aligned lines for a terminal."""
    lines = [
        f"{result['model']}, {result['dtype']} on {result['device']}: {result['requests']} request(s), "
        f"{result['input_len']} tokens in, {result['output_len']} out, median of {result['runs']} run(s)"
    ]
    for name, (title, unit) in _FIGURES.items():
        if name in result:
            seen = result["spread"][name]
            extremes = f"   ({seen['min']:,.3g} to {seen['max']:,.3g})" if len(result["samples"][name]) > 1 else ""
            lines.append(f"  {title:<22}{result[name]:>12,.2f} {unit}{extremes}")
    if "speculation" in result:
        counts = result["speculation"]
        share = counts["accepted_tokens"] / counts["draft_tokens"] if counts["draft_tokens"] else 0.0
        lines.append(f"  {'proposed tokens':<22}{counts['draft_tokens']:>12,d}, {share:.0%} of them accepted")
    return "\n".join(lines)
