"""The seam between the engine and whatever runs the model: five methods, several kinds, one contract.

Guarantees of every executor: results come back in the order of the plans; a plan of another epoch than the current
one is dropped; after `close` nothing it started is left. Does not retry, and does not know what a request is.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

import msgspec

from phalanx.config import EngineConfig
from phalanx.errors import PhalanxError
from phalanx.step import StepPlan, StepResult


class Shares(msgspec.Struct, frozen=True):
    """How the model was shared out, where that was decided when ranks had their places."""

    tensor_weights: tuple[tuple[float, ...], ...]
    """Of each stage's tensor ranks."""
    stage_layers: tuple[int, ...]
    """Empty for one stage."""
    why: str
    """Such as "by measured speed 1.00 / 0.40"."""


class CacheLayout(msgspec.Struct, frozen=True):
    """The KV cache that all ranks have: what the engine may hand out."""

    blocks: int
    block_size: int
    """Tokens."""
    bytes_per_block: int
    """Summed over ranks."""
    vocab_size: int
    """Rows of the output head: the width of logits and of grammar masks."""
    prompt_classes: tuple[int, ...] = ()
    """Prompt lengths above which the same tokens have other keys (models that stretch long prompts), ascending:
    requests on two sides of one share no cached blocks."""
    shares: Shares | None = None
    """Of the model, where they were decided in the first epoch, which this is."""


class WorkerStatus(msgspec.Struct):
    """One rank, as `/status` shows it."""

    rank: int
    pid: int
    node: str
    device: str
    state: str
    """loading, ready, recovering or dead."""
    layers: str
    """Half-open range, such as `0-30`."""
    heads: int
    memory: dict[str, int]
    """Bytes: `weights`, `kv_cache`, `activations`; `free` beside weights and cache, of a host each rank's part;
    `kv_room` is the most that the cache could have here."""
    step_s: float = 0.0
    """Seconds that a step with one token took here in the warm-up, without waiting for other stages."""
    environment: dict[str, str] = {}
    """The variables that decide how it computes, as they are there (`phalanx.env.computing`)."""
    weights: str = ""
    """Of the files that it has read (`checkpoint.fingerprint`)."""


class WorkerDied(PhalanxError):
    """A rank is gone or unusable; `rank` and `cause` say which and why, `node` where it ran, if that is known.

    `kind` is one of `KINDS`, for counting. `silent` is how many seconds had passed since its last sign of life when it
    was noticed, if that is known."""

    KINDS = ("killed", "out_of_memory", "ended", "hung", "network", "failed")
    """By a signal; for want of memory; by itself; no progress; not reached any more; an error of its own."""

    def __init__(self, rank: int, cause: str, *, node: str = "", kind: str = "failed", silent: float | None = None):
        who = f"Worker {rank}" if rank >= 0 else "The engine process"
        super().__init__(f"{who}{f' on {node}' if node else ''} died: {cause}.")
        self.rank = rank
        self.cause = cause
        self.node = node
        self.kind = kind
        self.silent = silent


class ExecutorLost(WorkerDied):
    """This process can bring nothing back; another engine process may."""


class NoCapacity(WorkerDied):
    """The model does not fit what is left, and nothing has come back yet: `missing` says what it takes. Trying again
    later may help."""

    def __init__(self, rank: int, cause: str, *, missing: str, node: str = ""):
        super().__init__(rank, cause, node=node)
        self.missing = missing


LoadProgress = Callable[[str, float], None]
"""Of one rank: called with a phase ("weights", "kv cache", "warm-up") and the share of it that is done, 0 to 1."""
StartProgress = Callable[[str, float, str], None]
"""Of all: with the phase, the share, and which ranks are how far, in words; empty for one."""


class Executor(Protocol):
    max_in_flight: int
    """Plans that may be submitted before the first result is collected (1, or the number of pipeline stages)."""

    def start(self, config: EngineConfig, progress: StartProgress | None = None) -> CacheLayout:
        """Load the model and allocate the cache; epoch 0 begins. `config` is resolved. Raises UserError, WorkerDied."""
        ...

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        """Run one step. The future raises WorkerDied when a rank is lost; that of a dropped plan is cancelled."""
        ...

    @property
    def hang_bound(self) -> float:
        """Seconds without progress after which a rank counts as hung now; 0 when nobody watches here."""
        ...

    @property
    def progress(self) -> int:
        """A number that changes as long as anything gets done, while loading too; its value means nothing. Read from
        any thread at any time."""
        ...

    @property
    def wants_restart(self) -> str | None:
        """What a restart at a quiet moment would take in again, in words; None when there is nothing. Where that has
        failed, it is not proposed again for a while, longer each time. Cheap enough to be asked once a second."""
        ...

    def restart(self, epoch: int) -> CacheLayout:
        """Forget every request and cached block and begin `epoch`; dead ranks are replaced, or the model is split anew
        over those that are left. Called from any thread, one at a time. Raises WorkerDied, NoCapacity."""
        ...

    def check_health(self) -> list[WorkerStatus]:
        """As of when each was last ready; whether it lives, as of now. Never waits for compute, and costs next to
        nothing: it is asked many times a second."""
        ...

    def close(self) -> None:
        """Idempotent."""
        ...
