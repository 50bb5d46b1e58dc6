"""Two ranks on two hosts with a link of a given speed: packing, overlap with computing, messages beside tensors.

    python benchmarks/links.py --rates 100mbit,1gbit,0 --json result.json

Hosts are network namespaces; the rate is kept by the kernel's token bucket (`tc … tbf`), 0 is the link as it is. Needs
root. Every figure is the slower rank's; plain and packed exchanges are timed in turn.

* packing: an all-reduce of a float32 and of a bfloat16 tensor, as it is and as 8-bit integers;
* overlap: an exchange, a computation of about the same time, and both at once in the background;
* messages: from sending 100 bytes to their answer, with nothing else on the link and during an exchange of 16 MB.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import msgspec
import torch

from benchmarks.common import setting, write
from phalanx.distributed.address import Address
from phalanx.distributed.bootstrap import Meeting
from phalanx.distributed.channels import Channels
from phalanx.distributed.collectives import Group
from phalanx.distributed.mesh import Mesh
from phalanx.distributed.transports.compressed import CompressedGroup

SIZES = (1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22)
LARGE = 1 << 24


def median_ms(call: Callable[[], object], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e3


def rank_main() -> None:
    """One rank: its address goes out, the roster and the work come in, figures go out; lines of JSON."""
    torch.set_num_threads(1)
    said = json.loads(sys.stdin.readline())
    channels = Channels(Mesh(tp=2), said["rank"], said["host"])
    print(json.dumps(plain_address(channels.address)), flush=True)
    roster = [msgspec.convert(each, Address) for each in json.loads(sys.stdin.readline())]
    channels.connect(roster, Meeting(0, bytes(32), exchange_timeout=120.0))
    plain: Group = channels._groups["tp"]
    packed: Group = CompressedGroup(plain, 0)  # type: ignore[arg-type]
    found = {
        "packing": [
            packing(plain, packed, dtype, n, said["rounds"]) for dtype in said["dtypes"] for n in said["sizes"]
        ],
        "overlap": overlap(channels, said["rounds"]),
        "messages": messages(channels, said["rank"]),
    }
    print(json.dumps(found), flush=True)
    plain.barrier()
    channels.close()


def plain_address(address: Address) -> dict[str, Any]:
    return {name: getattr(address, name) for name in address.__struct_fields__}


def packing(plain: Group, packed: Group, dtype: str, nbytes: int, rounds: int) -> dict[str, Any]:
    kind = getattr(torch, dtype)
    x = torch.randn(nbytes // kind.itemsize).to(kind)
    times: dict[str, list[float]] = {"plain": [], "packed": []}
    for _ in range(rounds + 1):
        for name, group in (("plain", plain), ("packed", packed)):
            plain.barrier()
            times[name].append(median_ms(functools.partial(group.all_reduce, x), 1))
    return {"dtype": dtype, "bytes": nbytes} | {name: statistics.median(all_[1:]) for name, all_ in times.items()}


def overlap(channels: Channels, rounds: int) -> dict[str, float]:
    """Milliseconds of an all-reduce of 4 MB, of products that take as much time of a core, and of both at once; `left`
    is what had still to be waited for after computing."""
    x, a = torch.randn(1 << 20), torch.randn(256, 256)

    def exchange(group: Group) -> torch.Tensor:
        return group.all_reduce(x)

    def barrier(group: Group) -> torch.Tensor:
        group.barrier()
        return x

    alone = median_ms(lambda: channels.exchange("tp", exchange), rounds)

    def compute() -> None:
        until = time.thread_time() + alone / 1e3
        while time.thread_time() < until:
            a @ a

    left: list[float] = []

    def both() -> None:
        pending = channels.start("tp", exchange)
        compute()
        began = time.perf_counter()
        pending.wait()
        left.append((time.perf_counter() - began) * 1e3)

    channels.exchange("tp", barrier)
    computing = median_ms(compute, rounds)
    channels.exchange("tp", barrier)
    together = median_ms(both, rounds)
    return {"exchange": alone, "compute": computing, "both": together, "left": statistics.median(left)}


def messages(channels: Channels, rank: int) -> dict[str, float]:
    """Milliseconds there and back, idle and during an exchange; and how long that exchange took."""

    def there_and_back() -> None:
        if rank == 0:
            channels.send_message(bytes(100), 1)
            channels.receive_message(1)
        else:
            channels.send_message(channels.receive_message(0), 0)

    idle = median_ms(there_and_back, 20)
    x, began = torch.zeros(LARGE // 4), time.perf_counter()
    pending = channels.start("tp", lambda group: group.all_reduce(x))
    busy = median_ms(there_and_back, 5)
    pending.wait()
    return {"idle": idle, "beside": busy, "exchange": (time.perf_counter() - began) * 1e3}


def measure(rate: str, sizes: Sequence[int], rounds: int) -> dict[str, Any]:
    from tests.helpers.hosts import test_bed

    with test_bed(2) as hosts:
        if rate != "0":
            for host in hosts:
                tc = [
                    "tc",
                    "qdisc",
                    "add",
                    "dev",
                    "eth0",
                    "root",
                    "tbf",
                    "rate",
                    rate,
                    "burst",
                    "128kb",
                    "latency",
                    "50ms",
                ]
                subprocess.run(["ip", "netns", "exec", host.namespace, *tc], check=True)
        children = [
            host.start([sys.executable, __file__, "--rank"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            for host in hosts
        ]
        work = {"sizes": list(sizes), "rounds": rounds, "dtypes": ["float32", "bfloat16"]}

        def tell(child: subprocess.Popen[bytes], what: Any) -> None:
            assert child.stdin
            child.stdin.write(json.dumps(what).encode() + b"\n")
            child.stdin.flush()

        def hear(child: subprocess.Popen[bytes]) -> Any:
            assert child.stdout
            return json.loads(child.stdout.readline())

        for rank, (child, host) in enumerate(zip(children, hosts, strict=True)):
            tell(child, {**work, "rank": rank, "host": host.address})
        roster = [hear(child) for child in children]
        for child in children:
            tell(child, roster)
        one, two = (hear(child) for child in children)
        for child in children:
            child.wait(30)
    rows = [
        {**a, **{name: max(a[name], b[name]) for name in ("plain", "packed")}}
        for a, b in zip(one["packing"], two["packing"], strict=True)
    ]
    worse = {key: {name: max(one[key][name], two[key][name]) for name in one[key]} for key in ("overlap", "messages")}
    return {"rate": rate, "packing": rows, **worse}


def table(links: Sequence[dict[str, Any]]) -> str:
    lines = ["| link | dtype | bytes | plain, ms | packed, ms | gain |", "|---|---|---:|---:|---:|---:|"]
    for link in links:
        name = "unlimited" if link["rate"] == "0" else link["rate"]
        for row in link["packing"]:
            times = f"{row['plain']:.2f} | {row['packed']:.2f} | {row['plain'] / row['packed']:.2f}"
            lines.append(f"| {name} | {row['dtype']} | {row['bytes']:,} | {times} |")
    heads = ("link", "exchange", "compute", "both", "still waited", "message idle", "beside 16 MB", "the 16 MB")
    lines += ["", f"| {' | '.join(heads)} |", "|---" + "|---:" * (len(heads) - 1) + "|"]
    for link in links:
        o, m = link["overlap"], link["messages"]
        name = "unlimited" if link["rate"] == "0" else link["rate"]
        figures = (o["exchange"], o["compute"], o["both"], o["left"], m["idle"], m["beside"], m["exchange"])
        lines.append(f"| {name} | " + " | ".join(f"{figure:.1f}" for figure in figures) + " |")
    return "\n".join(lines)


def main() -> None:
    if sys.argv[1:] == ["--rank"]:
        return rank_main()
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rates", default="100mbit,1gbit,0")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json")
    args = parser.parse_args()
    sizes = [int(size) for size in args.sizes.split(",")]
    links = [measure(rate, sizes, args.rounds) for rate in args.rates.split(",")]
    print(table(links), file=sys.stderr)
    write({"benchmark": "links", "links": links, "rounds": args.rounds, **setting()}, args.json)


if __name__ == "__main__":
    main()
