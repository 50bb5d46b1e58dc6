"""`phalanx bench comm`: flags and output around `phalanx.bench.comm`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from phalanx.bench.comm import SIZES, TRANSPORTS, measure, report, table
from phalanx.cli.bench import check_writable, count, tell
from phalanx.cli.flags import Parser
from phalanx.cli.messages import UsageError
from phalanx.config import parse_size
from phalanx.errors import ConfigError
from phalanx.planner.hardware import detect

_DESCRIPTION = (
    "How fast the ranks of this machine exchange tensors, for each operation and size, beside gloo on the same "
    "processes. Needs no model. tcp is measured over the loopback interface, as if each rank were on a node of its "
    "own; tcp-packed sends large floating-point tensors as 8-bit integers."
)
_LARGEST = 1 << 30


def run(argv: list[str]) -> int:
    args = _parser().parse(argv)
    ranks, seconds = count(args, "ranks", least=2), count(args, "seconds")
    if ranks > 64:
        raise UsageError(f"--ranks is {ranks}; it must be at most 64.")
    sizes, cores = _sizes(args.sizes), _cores(args.cores)
    target = args.json
    if target and target != "-":
        check_writable(Path(target))
    speeds = measure(ranks, args.transport, sizes, seconds=seconds, cores=cores)
    result = report(speeds, args.transport, detect())
    tell(result, table, target)
    return 0


def _parser() -> Parser:
    parser = Parser("bench comm", _DESCRIPTION, sections=())
    own: Any = parser.own
    own.add_argument("--ranks", metavar="N", default="2", help="Ranks, each a process with one thread. [2]")
    own.add_argument("--transport", choices=TRANSPORTS, default="shm", help="What to measure beside gloo. [shm]")
    default = ",".join(_name(size) for size in SIZES)
    own.add_argument("--sizes", metavar="LIST", default=default, help=f"Bytes of the whole tensor. [{default}]")
    own.add_argument("--seconds", metavar="N", default="10", help="About how long to measure. [10]")
    own.add_argument(
        "--cores",
        metavar="LIST",
        default="",
        help="Cores to pin the ranks to, in turn. [one each, where there are enough]",
    )
    own.add_argument("--json", metavar="FILE", help="Write the result as JSON; - is standard output.")
    return parser


def _sizes(text: str) -> list[int]:
    sizes = []
    for part in text.split(","):
        try:
            size = parse_size(part.strip())
        except ConfigError as error:
            raise UsageError(f"--sizes: {error.message}", fix=error.fix) from None
        if not 4 <= size <= _LARGEST:
            raise UsageError(f"--sizes has {size}; a tensor must have between 4 bytes and 1G.")
        sizes.append(size)
    return sizes


def _cores(text: str) -> list[int]:
    usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    try:
        cores = [int(part) for part in text.split(",")] if text else []
    except ValueError:
        raise UsageError(f"--cores is '{text}'.", fix="Give numbers separated by commas, such as 0,1.") from None
    if set(cores) - set(usable):
        raise UsageError(f"--cores is {text}; this process may use {', '.join(map(str, usable))}.")
    return cores


def _name(size: int) -> str:
    return f"{size >> 20}M" if size >= 1 << 20 else f"{size >> 10}K"
