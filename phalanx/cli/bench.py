"""`phalanx bench latency`, `throughput` and `comm`: flags, progress and output around `phalanx.bench`."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from phalanx.cli.flags import Parser, settings
from phalanx.cli.messages import UsageError
from phalanx.config import parse_size
from phalanx.errors import ConfigError, UserError

_SECTIONS = ("model", "cache", "scheduler", "parallel")
_NOT_YET = ("serve",)
_KINDS = {
    "latency": "How fast a few requests are answered: first token, prompt and answer tokens a second.",
    "throughput": "How many answer tokens a second many requests at once get.",
}
_OVERVIEW = """\
usage: phalanx bench {latency,throughput,comm} [flags]

  latency      time to first token, prefill and decode speed of --batch-size requests
  throughput   output tokens a second of --num-prompts requests at once
  comm         latency and bandwidth of what ranks exchange, beside gloo's; needs no model

Prompts are distinct and random, answers greedy and of an exact length. The workloads of the benchmark table are:

  phalanx bench latency --batch-size 1 --input-len 128 --output-len 128      decode of one stream
  phalanx bench latency --batch-size 1 --input-len 1024 --output-len 1       prefill
  phalanx bench throughput --num-prompts 32 --input-len 128 --output-len 64  32 streams

The first two also report start_s, from making the engine to the first token. 'phalanx bench latency --help' lists the
flags."""


def run(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(_OVERVIEW)
        return 0 if argv else 2
    kind, rest = argv[0], argv[1:]
    if kind in _NOT_YET:
        raise UsageError(f"'phalanx bench {kind}' is not in this version.", fix="Use latency, throughput or comm.")
    if kind == "comm":
        from phalanx.cli.bench_comm import run as run_comm

        return run_comm(rest)
    if kind not in _KINDS:
        raise UsageError(f"Unknown benchmark '{kind}'.", fix="Use latency, throughput or comm.")
    parser = _parser(kind)
    chosen = settings(parser, rest)
    args = chosen.args
    requests = count(args, "num_prompts" if kind == "throughput" else "batch_size")
    input_len, output_len = count(args, "input_len"), count(args, "output_len")
    runs, warmup, target = count(args, "runs"), count(args, "warmup", least=0), args.json
    if target and target != "-":
        check_writable(Path(target))

    from phalanx.bench.report import report, table
    from phalanx.bench.workload import Work, measure
    from phalanx.planner.hardware import detect

    work = Work(requests, input_len, output_len)
    seed = chosen.config.model.seed or 0
    bench, measured = asyncio.run(measure(chosen.config, work, runs=runs, warmup=warmup, seed=seed))
    result = report(kind, work, measured, bench.start_s, bench.engine.info, detect(), bench.speculation)
    tell(result, table, target)
    return 0


def _parser(kind: str) -> Parser:
    parser = Parser(f"bench {kind}", _KINDS[kind], sections=_SECTIONS)
    own: Any = parser.own
    if kind == "throughput":
        own.add_argument("--num-prompts", metavar="N", default="32", help="Requests at once. [32]")
    else:
        own.add_argument("--batch-size", metavar="N", default="1", help="Requests at once. [1]")
    length = "64" if kind == "throughput" else "128"
    own.add_argument("--input-len", metavar="N", default="128", help="Tokens of each prompt. [128]")
    own.add_argument("--output-len", metavar="N", default=length, help=f"Tokens of each answer. [{length}]")
    own.add_argument("--runs", metavar="N", default="5", help="Measured runs; figures are their medians. [5]")
    own.add_argument("--warmup", metavar="N", default="1", help="Runs before the measured ones. [1]")
    own.add_argument(
        "--json", metavar="FILE", help="Write the result as JSON, with every sample; - is standard output."
    )
    return parser


def count(args: argparse.Namespace, name: str, least: int = 1) -> int:
    """The flag's value as a whole number. Raises UsageError."""
    flag = "--" + name.replace("_", "-")
    try:
        value = parse_size(getattr(args, name))
    except ConfigError as error:
        raise UsageError(f"{flag}: {error.message}", fix=error.fix) from None
    if value < least:
        raise UsageError(f"{flag} is {value}; it must be at least {least}.")
    return value


def tell(result: dict[str, Any], table: Callable[[dict[str, Any]], str], target: str | None) -> None:
    """As a table, and as JSON to the file `target`; only as JSON where that is `-`."""
    text = json.dumps(result, indent=2)
    if target == "-":
        print(text)
        return
    print(table(result))
    if target:
        Path(target).write_text(text + "\n")
        print(f"written to {target}", file=sys.stderr)


def check_writable(path: Path) -> None:
    """Before minutes of measuring, not after. Raises UserError."""
    folder = path.absolute().parent
    if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise UserError(f"Cannot write {path}.", fix="Give --json a file in a folder that exists and can be written.")
