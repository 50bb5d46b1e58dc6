"""Whether a model's files are still those that were read before: the same on every machine, quick for large models too.

Takes a copy, a move and `touch` for what they are; files with other weights of the same shape are told apart. Samples
are looked at, not every byte: a difference in a few bytes may be overlooked.
"""

from __future__ import annotations

import hashlib

from phalanx.checkpoint.locate import Checkpoint
from phalanx.errors import CheckpointError

_SAMPLE = 4096
_SAMPLES = 256
"""Of all files together; each has two at least."""


def fingerprint(checkpoint: Checkpoint) -> str:
    """Raises OSError."""
    seen = hashlib.blake2b(digest_size=16)
    config = checkpoint.file("config.json")
    if config is not None and config.exists():
        seen.update(config.read_bytes())
    samples = max(2, _SAMPLES // max(1, len(checkpoint.weight_files)))
    for path in checkpoint.weight_files:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            seen.update(f"{path.name}:{size}\n".encode())
            last = max(0, size - _SAMPLE)
            for i in range(samples):
                file.seek(last * i // (samples - 1))
                seen.update(file.read(_SAMPLE))
    return seen.hexdigest()


def changed(model: str) -> CheckpointError:
    """`model` is what it is called, and where it is."""
    return CheckpointError(
        f"The files of {model} are not those that the server started with.",
        fix="Put them back, or start the server anew to serve what is there now.",
    )
