"""The life of a rank: device, load, measure, allocate, run plans, drop plans of another epoch, start over.

    loading ── load ── allocate ── ready ── run … run ── reset(epoch) ── run …
                                     └── a step raises: dead, until reset

A worker keeps nothing that its engine could not give it again, so `reset` only forgets. Not thread-safe, except
`status`, which never waits. Does not know how plans reach it: that is the executor's business.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
from collections.abc import Callable, Sequence

import msgspec
import torch

import phalanx
from phalanx import env
from phalanx.attention.registry import choose as choose_attention
from phalanx.checkpoint.fingerprint import changed, fingerprint
from phalanx.checkpoint.locate import Checkpoint, locate
from phalanx.config import EngineConfig
from phalanx.distributed.collectives import Groups
from phalanx.distributed.mesh import Mesh
from phalanx.distributed.pulse import Pulse
from phalanx.errors import ConfigError
from phalanx.executor.base import CacheLayout, LoadProgress, WorkerStatus
from phalanx.kernels.library import choice, use_threads
from phalanx.kernels.matmul import packs
from phalanx.kernels.weight_memory import WeightMemory
from phalanx.loading.image import Image, Keeper, NewImage, image_key, open_image, slower
from phalanx.loading.loader import load_decoder
from phalanx.models.decoder import Decoder
from phalanx.models.registry import read_spec
from phalanx.models.shares import kv_bytes_per_token, weight_bytes
from phalanx.models.spec import DecoderSpec
from phalanx.models.split import Split
from phalanx.models.stored import with_stored
from phalanx.quantization.base import choose_scheme
from phalanx.step import NO_TOKEN, Admission, Rows, SamplingState, StepPlan, StepResult, pack
from phalanx.worker.arithmetic import check_products
from phalanx.worker.kv_pool import KVPool
from phalanx.worker.limits import Memory, host_memory, usable_cores
from phalanx.worker.memory import Needs, activation_bytes, cache_budget, cache_size, check_before_loading
from phalanx.worker.model_runner import ModelRunner
from phalanx.worker.request_table import RequestTable
from phalanx.worker.residency import Residency
from phalanx.worker.stage_link import StageLink

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "int8": torch.int8}

log = logging.getLogger(__name__)

_WARM_UP_TOKENS = 16
_WARM_UP_STEPS = 4
"""After the prompt. The quickest is what a step takes: whatever else the machine does can only add to it."""


def open_worker(
    config: EngineConfig, *, mesh: Mesh | None = None, rank: int = 0, groups: Groups | None = None,
    tensor_weights: Sequence[Sequence[float]] = (), stage_layers: Sequence[int] = (), node_ranks: int = 1,
    longest: int = 0, pulse: Pulse | None = None, weights: str = "", keeper: Keeper | None = None,
) -> Worker:  # fmt: skip
    """A worker for the configured model, not loaded yet. `config` is resolved. Raises UserError.

    `tensor_weights` (per stage) and `stage_layers` say how the model is cut; both are even when empty. `node_ranks`
    ranks share this host's memory. A request of `longest` tokens must fit, or of --max-model-len. `pulse` shows its
    progress. `weights` is the fingerprint of those that are wanted, where that is known. `keeper` has the image of the
    weights of a rank that this one replaces, or keeps this one's.
    """
    checkpoint = locate(config.model.model, revision=config.model.revision)
    spec = with_stored(read_spec(checkpoint.config), checkpoint, config.model.quantization)
    mesh = mesh or Mesh()
    stage = mesh.place(rank).pp
    split = Split.of(spec, mesh, stage, stage_layers=stage_layers, tensor_weights=tensor_weights)
    return Worker(
        config, checkpoint, spec, mesh, rank, groups or Groups(), split, node_ranks, longest, pulse, weights, keeper
    )


class Worker:
    """One rank."""

    def __init__(
        self, config: EngineConfig, checkpoint: Checkpoint, spec: DecoderSpec, mesh: Mesh, rank: int, groups: Groups,
        split: Split | None = None, node_ranks: int = 1, longest: int = 0, pulse: Pulse | None = None,
        weights: str = "", keeper: Keeper | None = None,
    ):  # fmt: skip
        """Raises ConfigError for a device that is not there, or a mesh that the model cannot be cut for."""
        self.config = config
        self.checkpoint = checkpoint
        self.spec = spec
        self.mesh = mesh
        self.rank = rank
        self.place = mesh.place(rank)
        self.split = split or Split.even(spec, mesh, self.place.pp)
        self.groups = groups.handles()
        """Other transports are bound to these in each epoch; the decoder is built with them once."""
        self.node_ranks = node_ranks
        self.longest = longest
        self.pulse = pulse or Pulse()
        self.epoch = 0
        self.state = "loading"
        self.device = _device(config.model.device)
        self._scheme = choose_scheme(config.model.quantization, DTYPES[config.model.dtype], self.device)
        self._keeper = keeper if self.device.type == "cpu" else None
        self._image: Image | None = None
        self._wanted = weights
        self._fingerprint = ""
        self._weights = 0
        self._activations = 0
        self._kv_room = 0
        """Bytes that the KV cache could have here; the ranks agree on what the tightest has."""
        self._step_s = 0.0
        self._residency: Residency | None = None
        """Of the pool's memory."""
        self._checked = False
        self._decoder: Decoder | None = None
        self._pool: KVPool | None = None
        self._runner: ModelRunner | None = None

    # -- beginning

    def check_memory(self) -> None:
        """Raises NotEnoughMemory when weights, activations and a cache for one request cannot fit. Ranks that share a
        host all do this before any of them loads, so that none counts what another has just taken."""
        model, scheduler = self.config.model, self.config.scheduler
        self._weights = weight_bytes(self.spec, self.mesh, self.split, self.place, model.dtype)
        self._activations = activation_bytes(
            self.spec, model.dtype, tokens=scheduler.max_num_batched_tokens, rows=scheduler.max_num_sampled
        )
        memory, self._image = self._memory(), self._left()
        if self._image is not None:  # what it takes, it has taken already
            memory = Memory(memory.total, memory.available + self._image.nbytes)
        check_before_loading(self._needs(), memory, self.config.cache, device=self.device.type, dtype=model.dtype)
        self._checked = True

    def load(self, progress: LoadProgress | None = None) -> None:
        """Read the weights, or find them in the image. Raises NotEnoughMemory before reading any when they cannot fit
        (unless `check_memory` was called before), CheckpointError."""
        if not self._checked:
            self.check_memory()
        torch.set_num_threads(min(torch.get_num_threads(), usable_cores()))
        use_threads(torch.get_num_threads())
        if self.device.type == "cpu" and self.rank == 0 and not (kernels := choice()).native:
            log.warning("Kernels: %s. %s", kernels.reason, kernels.remedy)
        dtype = DTYPES[self.config.model.dtype]
        if self.device.type == "cpu" and not packs(dtype, self.device):  # else no product is PyTorch's
            check_products(dtype)

        def loaded(share: float) -> None:
            self.pulse.count += 1  # and no more: what is being loaded is of use in the next epoch too
            if progress is not None:
                progress("weights", share)

        self._decoder = self._found(loaded) or self._read(loaded)
        self._decoder.pulse = self.pulse
        self._weights = self._decoder.nbytes

    def _left(self) -> Image | None:
        """The image of what this rank is to hold, if there is one."""
        if self._keeper is None or self._keeper.left is None:
            return None
        image = open_image(self._keeper.left, self._image_key(self._keeper))
        return None if image is None or self._wanted not in ("", image.header.fingerprint) else image

    def _found(self, progress: Callable[[float], None]) -> Decoder | None:
        """From the image."""
        image, self._image = self._image, None
        if image is None:
            return None
        try:
            memory = image.memory()
            decoder = self._filled(memory, progress)
        except (OSError, ValueError, msgspec.ValidationError) as error:
            log.warning("The image of the weights cannot be used (%s); they are read again.", error)
            return None
        if memory.asked != image.header.asked:
            log.warning("The image of the weights has others than this rank's; they are read again.")
            return None
        self._fingerprint = image.header.fingerprint
        progress(1.0)
        return decoder

    def _read(self, progress: Callable[[float], None]) -> Decoder:
        """From the checkpoint; an image is left for whoever comes next. Raises CheckpointError."""
        self._fingerprint = fingerprint(self.checkpoint)
        if self._wanted not in ("", self._fingerprint):
            raise changed(f"the model on {platform.node()}")
        if self._keeper is None or slower():
            return self._filled(None, progress)
        try:
            image = NewImage(self._weights)
        except OSError as error:
            log.debug("no image of the weights: %s", error)
            return self._filled(None, progress)
        with contextlib.closing(image):
            decoder = self._filled(image.memory, progress)
            try:
                fd = image.seal(self._image_key(self._keeper), self._fingerprint, decoder.nbytes)
                if fd is not None:
                    self._keeper.keep(fd)
                    os.close(fd)
            except OSError as error:
                log.warning("No image of the weights is kept, so a lost rank would read them again: %s.", error)
        return decoder

    def _filled(self, memory: WeightMemory | None, progress: Callable[[float], None]) -> Decoder:
        model = self.config.model
        return load_decoder(
            self.checkpoint,
            self.spec,
            mesh=self.mesh,
            rank=self.rank,
            groups=self.groups,
            dtype=DTYPES[model.dtype],
            device=self.device,
            backend=choose_attention(self.device.type, dtype=model.dtype, cache_dtype=self.config.cache.kv_cache_dtype),
            load_format="dummy" if model.load_format == "dummy" else "auto",
            progress=progress,
            split=self.split,
            scheme=self._scheme,
            memory=memory,
        )

    def _image_key(self, keeper: Keeper) -> str:
        model = self.config.model
        shown = (keeper.share, self.spec, self.mesh, self.rank, self.split, model.dtype, self._scheme.name)
        return image_key(*shown, model.load_format, choice().reason, phalanx.__version__)

    def rejoin(self, groups: Groups) -> None:
        """The transports of a new epoch; the weights stay. `allocate` makes the rest new."""
        self.groups.bind(groups)

    def cache_size(self) -> int:
        """How many blocks this rank can hold beside its weights. Raises NotEnoughMemory."""
        decoder = self._loaded()
        if self._pool is not None:  # what is there can be had again
            return self._pool.blocks
        if self.device.type == "cuda":
            self._activations = self._measured_activations(decoder)
        memory, cache = self._memory(), self.config.cache
        blocks = cache_size(self._needs(), memory, cache, device=self.device.type)
        self._kv_room = cache_budget(memory, self._activations, cache, device=self.device.type)[0]
        return blocks

    def allocate(
        self, progress: LoadProgress | None = None, *, blocks: int | None = None, epoch: int = 0
    ) -> CacheLayout:
        """Allocate a KV cache of `blocks` (default: `cache_size`) and forget all requests. In epoch 0, run once, so
        that the first request finds everything ready; later, requests wait already, and theirs is the first run.
        Plans of `epoch` count from now on. Raises NotEnoughMemory.
        """
        decoder = self._loaded()
        report = progress or _silent
        report("kv cache", 0.0)
        if blocks is None:
            blocks = self.cache_size()
        if self._pool is None or self._pool.blocks != blocks:
            self._drop_pool()  # before the new one, so that both are never there
            self._pool = self._new_pool(decoder, blocks)
            self._residency = Residency(self._pool, self.node_ranks)
        self._runner = self._new_runner(decoder, self._pool)
        self.epoch = epoch
        report("kv cache", 1.0)
        if epoch == 0:
            report("warm-up", 0.0)
            self._warm_up(self._runner, tokens=min(_WARM_UP_TOKENS, self._max_model_len()), rows=1)
            report("warm-up", 1.0)
        self.state = "ready"
        return self.layout()

    def layout(self) -> CacheLayout:
        pool = self._allocated()
        return CacheLayout(
            blocks=pool.blocks,
            block_size=pool.block_size,
            bytes_per_block=pool.bytes_per_block,
            vocab_size=self.spec.vocab_size,
            prompt_classes=self.spec.prompt_classes,
        )

    # -- steps

    def run(self, plan: StepPlan) -> StepResult | None:
        """The result; None for a plan of another epoch, which is dropped. An exception leaves the worker dead."""
        if plan.epoch != self.epoch:
            return None
        if self._runner is None or self.state != "ready":
            raise RuntimeError(f"the worker is {self.state}")
        if self._residency is not None:
            self._residency.step_begins()
        try:
            return self._runner.run(plan)
        except BaseException:
            self.state = "dead"  # the table may be half changed
            raise
        finally:
            if self._residency is not None:
                self._residency.step_ends()

    def reset(self, epoch: int) -> None:
        """Forget every request and cached block; plans of `epoch` count from now on."""
        self._runner = self._new_runner(self._loaded(), self._allocated())
        self.epoch = epoch
        self.state = "ready"

    def status(self, node_ranks: int = 1) -> WorkerStatus:
        """`node_ranks` ranks live on this host now: each has a part of what is free beside all their caches."""
        first, last = self.split.layers.ranges[self.place.pp]
        heads = [self.split.heads(layer.attention).length(self.place.tp) for layer in self.spec.layers[first:last]]
        return WorkerStatus(
            rank=self.rank,
            pid=os.getpid(),
            node=platform.node(),
            device=str(self.device),
            state=self.state,
            layers=f"{first}-{last}",
            heads=max(heads, default=0),
            memory={
                "weights": self._weights,
                "kv_cache": self._pool.nbytes if self._pool is not None else 0,
                "activations": self._activations,
                "free": self._free(node_ranks),
                "kv_room": self._kv_room,
            },
            step_s=self._step_s,
            environment=env.computing(),
            weights=self._fingerprint,
        )

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        self._drop_pool()
        self._decoder = None
        self.state = "dead"
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    # -- parts

    def _loaded(self) -> Decoder:
        if self._decoder is None:
            raise RuntimeError("the worker has no weights")
        return self._decoder

    def _allocated(self) -> KVPool:
        if self._pool is None:
            raise RuntimeError("the worker has no KV cache")
        return self._pool

    def _drop_pool(self) -> None:
        if self._residency is not None:
            self._residency.end()
        self._runner = self._pool = self._residency = None

    def _new_pool(self, decoder: Decoder, blocks: int) -> KVPool:
        dtype = DTYPES[self.config.cache.kv_cache_dtype]
        return KVPool(decoder, blocks=blocks, block_size=self.config.cache.block_size, dtype=dtype)

    def _new_runner(self, decoder: Decoder, pool: KVPool) -> ModelRunner:
        table = RequestTable(
            slots=self.config.scheduler.max_num_seqs,
            max_model_len=self._max_model_len(),
            block_size=pool.block_size,
            blocks=pool.blocks,
            vocab_size=self.spec.vocab_size,
            own_tokens=decoder.own_tokens,
        )
        link = None
        if self.mesh.pp > 1:
            link = StageLink(self.groups, self.place, self.spec.hidden_size, decoder.dtype, self.device)
        return ModelRunner(decoder, pool, table, self.device, link)

    def _max_model_len(self) -> int:
        return self.config.model.max_model_len or self.spec.max_positions

    def _needs(self) -> Needs:
        return Needs(
            weights=self._weights,
            activations=self._activations,
            kv_bytes_per_token=kv_bytes_per_token(self.spec, self.split, self.place, self.config.cache.kv_cache_dtype),
            block_size=self.config.cache.block_size,
            max_model_len=self.longest or self._max_model_len(),
            max_num_seqs=self.config.scheduler.max_num_seqs,
        )

    def _free(self, node_ranks: int) -> int:
        if self.device.type == "cuda":
            return self._memory().available
        reserved = self._pool.untouched if self._pool is not None else 0
        return max(host_memory().available // node_ranks - reserved, 0)

    def _memory(self) -> Memory:
        if self.device.type == "cuda":
            available, total = torch.cuda.mem_get_info(self.device)
            return Memory(total=total, available=available)
        memory = host_memory()
        return Memory(memory.total // self.node_ranks, memory.available // self.node_ranks)

    def _measured_activations(self, decoder: Decoder) -> int:
        """Peak bytes of the largest step, beside weights and cache; CUDA counts what it hands out."""
        scheduler = self.config.scheduler
        tokens = scheduler.max_num_batched_tokens
        rows = min(scheduler.max_num_seqs, tokens)
        per_row = min(-(-tokens // rows), self._max_model_len(), 65535)
        pool = self._new_pool(decoder, rows * self._warm_up_blocks(per_row))
        runner = self._new_runner(decoder, pool)
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        self._warm_up(runner, tokens=per_row, rows=rows)
        peak = torch.cuda.max_memory_allocated(self.device) - before
        del pool, runner
        torch.cuda.empty_cache()
        return peak

    def _warm_up(self, runner: ModelRunner, *, tokens: int, rows: int) -> None:
        """Run `rows` requests of `tokens` tokens through a prefill and a decode, and forget them."""
        blocks = self._warm_up_blocks(tokens)
        admissions = [
            Admission(
                slot=slot,
                tokens=bytes(4 * tokens),
                num_prompt=tokens,
                num_computed=0,
                blocks=pack(range(slot * blocks, (slot + 1) * blocks)),
                sampling=SamplingState(top_p=0.9),
            )
            for slot in range(rows)
        ]
        slots = pack(range(rows), "H")
        prefill = Rows(slots=slots, num_tokens=pack([tokens] * rows, "H"), last_tokens=pack([NO_TOKEN] * rows))
        decode = Rows(slots=slots, num_tokens=pack([1] * rows, "H"), last_tokens=pack([0] * rows))
        runner.run(StepPlan(epoch=self.epoch, step_id=0, admissions=admissions, rows=prefill))
        times = []
        for _ in range(min(_WARM_UP_STEPS, self._max_model_len() - tokens)):
            runner.run(StepPlan(epoch=self.epoch, step_id=0, rows=decode))
            times.append(runner.worked_s)
        self._step_s = min(times, default=0.0)
        runner.run(StepPlan(epoch=self.epoch, step_id=0, released=slots))

    def _warm_up_blocks(self, tokens: int) -> int:
        """Blocks that one request of the warm-up takes: its tokens, and those after them as far as the context goes."""
        return -(-min(tokens + _WARM_UP_STEPS, self._max_model_len()) // self.config.cache.block_size)


def _device(name: str) -> torch.device:
    if name == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(
                "--device is cuda, but PyTorch finds no CUDA device here.",
                fix="Use --device cpu, or install a CUDA build of PyTorch and a driver.",
            )
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _silent(phase: str, share: float) -> None:
    return None
