"""What a killed rank costs those who wait for tokens, and what being able to replace it costs everybody else.

    python benchmarks/recovery.py --rounds 30 --split-rounds 30 --engine-rounds 30 --json result.json

Rounds: the demo model in float32 over two `mp` ranks, four streams of at most 256 tokens; somewhere in the middle one
rank is killed with SIGKILL. `moved` is from the kill until *all four* streams have moved again (seen by the clients),
`noticed` from the kill to the notice, `reload` and `first_token` from the notice, as `/status` has them. Each answer
is compared with that of an undisturbed run. Split rounds: the same, but whatever is started in the place of the
killed rank is killed too, so that after two tries the model is split anew over the other; then the place heals, and
is taken in again before the next round. Engine rounds: the engine process is killed, which has the only rank.
Overhead: the same streams undisturbed, with recovery and with `--no-enable-recovery` in turn: instructions where the
processor counts them, else processor time, of all processes.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import setting, shown, summary, write
from tests.helpers.history import assemble, next_event_after
from tests.helpers.processes import wait_until
from tests.helpers.serving import Client, Serving

STREAMS = 4
PROMPTS = ("The sea is", "Once upon a time", "The capital of France", "A computer is")
OPTIONS = ("--dtype", "float32", "--kv-cache-memory-bytes", "256M", "--max-model-len", "2048")
FIRST_S = 120.0


def ask(serving: Serving, tokens: int) -> list[Client]:
    fields = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return [Client(serving, prompt, {"prompt": prompt, **fields}) for prompt in PROMPTS[:STREAMS]]


def texts(clients: list[Client]) -> list[str]:
    """Raises SystemExit when a stream has no proper end."""
    for client in clients:
        client.join(FIRST_S)
        answer = assemble(client.saw)
        if client.is_alive() or client.saw.broken or answer.errors or answer.complaints:
            raise SystemExit(f"a stream went wrong: {client.saw.broken} {answer.errors} {answer.complaints}")
    return [assemble(client.saw).choices[0].text for client in clients]


def serve(folder: Path, *options: str, ranks: int = 2, fault: str = "") -> Serving:
    serving = Serving([*OPTIONS, "-tp", str(ranks), *options], folder / "log", env={"PHALANX_FAULT": fault})
    serving.ready()
    return serving


def kill_one(
    serving: Serving, rank: int, tokens: int, after: int, wanted: list[str], plan: str = "restart"
) -> dict[str, float]:
    """`plan` is what has to be done about it."""
    clients = ask(serving, tokens)
    if not wait_until(lambda: all(len(client.saw.events) >= after for client in clients), FIRST_S):
        raise SystemExit("the streams do not start")
    pid, epoch = serving.ranks()[rank], serving.status()["epoch"]
    killed, killed_wall = time.monotonic(), time.time()
    os.kill(pid, signal.SIGKILL)
    got = texts(clients)
    if got != wanted:
        raise SystemExit("an answer differs from the undisturbed one")
    moved = next_event_after([client.saw for client in clients], killed)
    new = [recovery for recovery in serving.status()["recoveries"] if recovery["epoch"] > epoch]
    if moved is None or not new:
        raise SystemExit("the streams were over before the kill; more --tokens")
    last = new[0]
    if last["plan"] != plan:
        raise SystemExit(f"it was not a {plan}: {last}")
    return {
        "moved": moved,
        "noticed": last["since"] - killed_wall,
        "reload": last["reload_s"],
        "first_token": last["first_token_s"],
        "recomputed": last["recomputed"],
    }


def kills(rounds: int, tokens: int, ranks: int = 2) -> list[dict[str, float]]:
    rng, found = random.Random(7), []
    with tempfile.TemporaryDirectory() as folder:
        serving = serve(Path(folder), ranks=ranks)
        try:
            wanted = texts(ask(serving, tokens))
            for number in range(rounds):
                found.append(kill_one(serving, number % ranks, tokens, rng.randint(10, tokens // 2), wanted))
                print(f"round {number + 1}: {found[-1]['moved']:.2f} s", file=sys.stderr, flush=True)
            if serving.stop() != 0:
                raise SystemExit("the server did not end well")
        finally:
            serving.kill()
    return found


def splits(rounds: int, tokens: int) -> list[dict[str, float]]:
    rng, found = random.Random(7), []
    with tempfile.TemporaryDirectory() as folder:
        broken = Path(folder) / "broken"
        serving = serve(Path(folder), fault=f"at=join,rank=1,do=kill,while={broken}")
        try:
            wanted = texts(ask(serving, tokens))
            for number in range(rounds):
                broken.touch()
                found.append(kill_one(serving, 1, tokens, rng.randint(10, tokens // 2), wanted, plan="split"))
                print(f"split {number + 1}: {found[-1]['moved']:.2f} s", file=sys.stderr, flush=True)
                broken.unlink()
                if not wait_until(lambda: serving.at_rest(1) and len(serving.ranks()) == 2, FIRST_S):
                    raise SystemExit("the place is not taken in again")
            if serving.stop() != 0:
                raise SystemExit("the server did not end well")
        finally:
            serving.kill()
    return found


# --------------------------------------------------------------------------------------------- undisturbed runs


def counts_instructions() -> bool:
    try:
        done = subprocess.run(["perf", "stat", "-x,", "-e", "instructions:u", "true"], capture_output=True, text=True)
    except OSError:
        return False
    return done.returncode == 0 and done.stderr.split(",")[0].isdigit()


def work(serving: Serving, tokens: int, instructions: bool) -> float:
    """Instructions, or seconds of processor time, of all processes, for one batch of streams."""
    pids = [pid for group in serving.members().values() for pid in group]
    if not instructions:
        before = sum(map(_seconds, pids))
        texts(ask(serving, tokens))
        return sum(map(_seconds, pids)) - before
    command = ["perf", "stat", "-x,", "-e", "instructions:u", "-p", ",".join(map(str, pids))]
    counter = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    texts(ask(serving, tokens))
    counter.send_signal(signal.SIGINT)
    return float(counter.communicate()[1].split(",")[0])


def _seconds(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def overhead(rounds: int, tokens: int) -> dict[str, Any]:
    instructions = counts_instructions()
    ratios: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        on, off = serve(Path(folder)), serve(Path(folder), "--no-enable-recovery")
        try:
            for serving in (on, off):
                work(serving, tokens, instructions)
            for number in range(rounds):
                pair = (on, off) if number % 2 == 0 else (off, on)
                cost = {serving: work(serving, tokens, instructions) for serving in pair}
                ratios.append(cost[on] / cost[off])
        finally:
            on.kill()
            off.kill()
    return {"counted": "instructions" if instructions else "processor time", "ratio": summary(ratios), "rounds": rounds}


def spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return {"n": len(ordered), "p50": ordered[len(ordered) // 2], "p99": p99, "max": ordered[-1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--split-rounds", type=int, default=10)
    parser.add_argument("--engine-rounds", type=int, default=10)
    parser.add_argument("--overhead-rounds", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--json", help="where to write the result")
    wanted = parser.parse_args()
    result: dict[str, Any] = {**setting(), "streams": STREAMS, "tokens": wanted.tokens}
    arms = (
        ("kill", wanted.rounds, kills),
        ("split", wanted.split_rounds, splits),
        ("engine", wanted.engine_rounds, partial(kills, ranks=1)),
    )
    for arm, rounds, measure in arms:
        if rounds:
            found = measure(rounds, wanted.tokens)
            result[arm] = {name: spread([one[name] for one in found]) for name in found[0]}
    if wanted.overhead_rounds:
        result["overhead"] = overhead(wanted.overhead_rounds, wanted.tokens)
        print(f"{result['overhead']['counted']}, on/off: {shown(result['overhead']['ratio'], 3)}", file=sys.stderr)
    for arm, _, _ in arms:
        for name, values in result.get(arm, {}).items():
            shown_name, line = f"{arm} {name}", "p50 {p50:.2f}, p99 {p99:.2f}, most {max:.2f}".format(**values)
            print(f"{shown_name:18} {line}", file=sys.stderr)
    write(result, wanted.json)


if __name__ == "__main__":
    main()
