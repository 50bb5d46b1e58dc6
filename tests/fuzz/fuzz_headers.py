"""Fuzzes the readers of GGUF and safetensors headers: whatever the bytes, only the readers' own errors come out.

    python tests/fuzz/fuzz_headers.py gguf --runs 1000000

With atheris (`pip install atheris`, no part of this project's environment) the inputs are steered by coverage; without
it they are random changes of valid files. Also checked: tensors that are accepted lie within the file and have as many
bytes as their shape and type need; no run takes long; no run may allocate more than `--memory` MB; every 500th run is
measured, and must hold memory in proportion to its input. Needs only `phalanx` and the standard library. The exit code
is 0 after the last run, 1 at the first finding, whose input is kept.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import resource
import signal
import struct
import sys
import tempfile
import time
import traceback
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
try:
    import atheris
except ImportError:
    atheris = None

if atheris:
    with atheris.instrument_imports(include=["phalanx.checkpoint", "json"]):
        from phalanx.checkpoint import gguf_config, gguf_header, safetensors_header
else:
    from phalanx.checkpoint import gguf_config, gguf_header, safetensors_header
from phalanx.errors import FormatError, UnsupportedModel

MAX_BYTES = 4096
"""Of one input: several times as much as the seeds have."""
MEASURE_EVERY = 500
BYTES_PER_BYTE, BYTES_IN_ANY_CASE = 16, 300_000
"""How much a reader may hold at most for each byte of its file."""
HANG_S = 10

NUMBERS = [0, 1, 2, 3, 7, 8, 9, 12, 31, 32, 255, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**61]
NUMBERS += [2**63 - 1, 2**63, 2**64 - 32, 2**64 - 1]


# -- what is read ----------------------------------------------------------------------------------------------------


def read_gguf(path: Path) -> None:
    """The header, and the configuration made from it."""
    file = gguf_header.read_gguf(path)
    sizes = {name: (block, size) for name, block, size in gguf_header.GGML_TYPES.values()}
    for info in file.tensors.values():
        block, size = sizes[info.dtype]
        check_tensor(info, math.prod(info.shape) // block * size)
    json.dumps(gguf_config.hf_config(file))
    gguf_config.generation_config(file)


def read_safetensors(path: Path) -> None:
    for info in safetensors_header.read_headers([path]).values():
        check_tensor(info, math.prod(info.shape) * safetensors_header.SAFETENSORS_TYPES[info.dtype] // 8)


def check_tensor(info: Any, nbytes: int) -> None:
    if not (info.offset > 0 and info.offset + info.nbytes <= info.file.stat().st_size and info.nbytes == nbytes):
        raise RuntimeError(f"a tensor outside its file was accepted: {info}")


# -- seeds -----------------------------------------------------------------------------------------------------------


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def gguf_seeds() -> list[bytes]:
    """A small decoder with a vocabulary, scalars of each type, nested arrays and several tensor types."""
    pairs = [
        text(b"general.architecture") + struct.pack("<I", 8) + text(b"llama"),
        text(b"general.alignment") + struct.pack("<II", 4, 32),
        *(
            text(b"llama." + key) + struct.pack("<II", 4, number)
            for key, number in [
                (b"block_count", 1), (b"context_length", 64), (b"embedding_length", 32),
                (b"feed_forward_length", 48), (b"attention.head_count", 4), (b"attention.head_count_kv", 2),
            ]
        ),
        text(b"llama.attention.layer_norm_rms_epsilon") + struct.pack("<If", 6, 1e-5),
        text(b"tokenizer.ggml.model") + struct.pack("<I", 8) + text(b"gpt2"),
        text(b"tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 3) + text(b"a") + text(b"b") + text("é".encode()),
        text(b"tokenizer.ggml.scores") + struct.pack("<IIQ3f", 9, 6, 3, 0, 1, 2),
        text(b"tokenizer.ggml.eos_token_id") + struct.pack("<II", 4, 2),
        text(b"nested") + struct.pack("<IIQ", 9, 9, 2) + 2 * struct.pack("<IQHH", 2, 2, 7, 8),
        text(b"flag") + struct.pack("<I?", 7, True),
        text(b"wide") + struct.pack("<Id", 12, 0.5) + text(b"long") + struct.pack("<Iq", 11, -5),
    ]  # fmt: skip
    tensors = [
        (b"token_embd.weight", 0, (32, 3)),
        (b"output_norm.weight", 0, (32,)),
        (b"blk.0.attn_q.weight", 3, (32, 32)),
    ]
    sizes = [384, 128, 640]
    records = b""
    for (name, kind, extents), offset in zip(tensors, (0, 384, 512), strict=True):
        records += text(name) + struct.pack(f"<I{len(extents)}QIQ", len(extents), *extents, kind, offset)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(pairs) + 1) + b"".join(pairs) + records
    whole = head + bytes(-len(head) % 32) + bytes(range(128)) * (sum(sizes) // 128)
    empty = b"GGUF" + struct.pack("<IQQ", 2, 0, 0)
    return [whole, empty, empty + bytes(40)]


def safetensors_seeds() -> list[bytes]:
    header = {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b.weight": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
        "c": {"dtype": "F4", "shape": [2, 1], "data_offsets": [32, 33]},
        "é": {"dtype": "BOOL", "shape": [], "data_offsets": [33, 34]},
        "none": {"dtype": "I64", "shape": [0, 5], "data_offsets": [34, 34]},
    }
    raw = json.dumps(header).encode()
    return [struct.pack("<Q", len(raw)) + raw + bytes(34), struct.pack("<Q", 2) + b"{}"]


# -- changing inputs -------------------------------------------------------------------------------------------------

WORDS = [b'"F32"', b'"F4"', b"[", b"]", b"{", b"}", b",", b":", b"null", b"true", b"1e400", b"NaN", b"-1", b"0.5"]
WORDS += [b'"\\ud800"', b'"a":', b"[0,0]", b"99999999999999999999", b"\xff", b'"__metadata__":', b"[" * 2000]


def changed(data: bytes, dice: random.Random) -> bytes:
    """A few random changes: bits, bytes, numbers of 4 and 8 bytes, words of JSON, pieces cut, doubled, swapped."""
    raw = bytearray(data)
    for _ in range(dice.choice((1, 1, 2, 3, 6))):
        if not raw:
            return bytes(raw)
        at = dice.randrange(len(raw))
        match dice.randrange(9):
            case 0:
                raw[at] = dice.randrange(256)
            case 1:
                raw[at] ^= 1 << dice.randrange(8)
            case 2:
                raw[at : at + 8] = struct.pack("<Q", dice.choice(NUMBERS))
            case 3:
                raw[at : at + 4] = struct.pack("<I", dice.choice(NUMBERS) % 2**32)
            case 4:
                del raw[at : at + dice.choice((1, 2, 4, 8, 16, 4096))]
            case 5:
                raw[at:at] = raw[at : at + dice.randrange(1, 64)]
            case 6:
                other = dice.randrange(len(raw))
                raw[at : at + 8] = raw[other : other + 8]
            case 7:
                raw[at:at] = dice.choice(WORDS)
            case 8:
                raw[at : at + 1] = str(dice.choice(NUMBERS)).encode()
    return bytes(raw[:MAX_BYTES])


def with_true_length(data: bytes) -> bytes:
    """A safetensors file whose first number says where its header really ends: changes reach what is behind it."""
    end = data.rfind(b"}") + 1
    return struct.pack("<Q", end - 8) + data[8:] if end > 8 else data


# -- running ---------------------------------------------------------------------------------------------------------


class Fuzz:
    """Feeds inputs to one reader and counts what became of them; ends the process after the last run or a finding."""

    def __init__(self, kind: str, runs: int, seed: int, keep: Path):
        self.kind = kind
        self.runs = runs
        self.seed = seed
        self.keep = keep
        self.read: Callable[[Path], None] = read_gguf if kind == "gguf" else read_safetensors
        shared = Path("/dev/shm")
        self._folder = tempfile.TemporaryDirectory(prefix="fuzz-", dir=shared if shared.is_dir() else None)
        self._path = Path(self._folder.name) / f"m.{kind}"
        self._done = self._accepted = 0
        self._began = time.monotonic()

    def one(self, data: bytes) -> None:
        path = self._path
        path.write_bytes(data)
        measure = self._done % MEASURE_EVERY == 0
        if measure:
            tracemalloc.start()
        signal.alarm(HANG_S)
        try:
            self.read(path)
            self._accepted += 1
        except (FormatError, UnsupportedModel):
            pass
        except Exception:  # whatever else comes out is a finding
            self._found(data, traceback.format_exc())
        finally:
            signal.alarm(0)
        if measure:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            if peak > BYTES_IN_ANY_CASE + BYTES_PER_BYTE * len(data):
                self._found(data, f"{peak} bytes were held for a file of {len(data)}")
        path.unlink()  # its pages may still be mapped
        self._done += 1
        if self._done >= self.runs:
            self._finish()

    def by_chance(self) -> None:
        dice = random.Random(self.seed)
        seeds = gguf_seeds() if self.kind == "gguf" else safetensors_seeds()
        pool = list(seeds)
        while True:
            data = changed(dice.choice(pool), dice)
            if self.kind == "safetensors" and dice.random() < 0.8:
                data = with_true_length(data)
            before = self._accepted
            self.one(data)
            if self._accepted > before and data not in pool:  # go on from other valid files, too
                pool = [*seeds, *pool[len(seeds) :][-60:], data]

    def by_coverage(self, corpus: Path) -> None:
        for number, data in enumerate(gguf_seeds() if self.kind == "gguf" else safetensors_seeds()):
            (corpus / f"seed{number}").write_bytes(data)

        def mutate(data: bytes, max_size: int, seed: int) -> bytes:
            dice = random.Random(seed)
            data = changed(data, dice) if dice.random() < 0.5 else atheris.Mutate(data, max_size)
            if self.kind == "safetensors" and dice.random() < 0.8:
                data = with_true_length(data)
            return data[:max_size]

        flags = [f"-seed={self.seed}", f"-max_len={MAX_BYTES}", "-rss_limit_mb=0", "-print_final_stats=1"]
        atheris.Setup([sys.argv[0], *flags, str(corpus)], self.one, custom_mutator=mutate)
        atheris.Fuzz()

    def _finish(self) -> NoReturn:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        print(
            f"{self.kind}: {self._done:,} runs {'by coverage' if atheris else 'by chance'}, seed {self.seed}, "
            f"no finding; "
            f"{self._accepted:,} accepted, {self._done - self._accepted:,} refused; peak {peak} MB; "
            f"{time.monotonic() - self._began:.0f} s",
            flush=True,
        )
        self._folder.cleanup()
        os._exit(0)

    def _found(self, data: bytes, what: str) -> NoReturn:
        kept = self.keep / f"finding-{self.kind}-{self._done}"
        kept.write_bytes(data)
        print(
            f"{self.kind}: a finding in run {self._done}, seed {self.seed}; the input is in {kept}\n{what}", flush=True
        )
        self._folder.cleanup()
        os._exit(1)


def limit_memory(megabytes: int) -> None:
    """Above what the process has now; more makes allocations fail, which is a finding."""
    now = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (now + megabytes * 2**20,) * 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("gguf", "safetensors"))
    parser.add_argument("--runs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--memory", type=int, default=256, help="MB that may be allocated beyond the start's")
    parser.add_argument("--keep", type=Path, default=Path(), help="folder for the input of a finding")
    arguments = parser.parse_args()
    fuzz = Fuzz(arguments.kind, arguments.runs, arguments.seed, arguments.keep)

    def hangs(number: int, frame: Any) -> NoReturn:
        raise TimeoutError(f"a run took more than {HANG_S} s")

    signal.signal(signal.SIGALRM, hangs)
    limit_memory(arguments.memory)
    if atheris:
        with tempfile.TemporaryDirectory(prefix="fuzz-corpus-") as corpus:
            fuzz.by_coverage(Path(corpus))
    else:
        fuzz.by_chance()


if __name__ == "__main__":
    main()
