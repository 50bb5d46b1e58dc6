"""`RayDistributedEngine`: one model on a Ray cluster, answered by a pool of `RayWorker` leaders.

    engine = RayDistributedEngine(model_name="…", tensor_parallel_size=2, data_parallel_size=2)
    responses = engine.generate([Request(prompt="Hello"), Request(prompt="Bye")], SamplingConfig(max_tokens=20))
    engine.close()

    requests ──groups──▶ least loaded leader ──Moved…──▶ progress of each request
       ▲                     │ lost                            │
       └─────────────────────┴──── again, with what is delivered

Guarantees: responses come in the order of the requests; a leader's death repeats and loses no token, and draws go on
with the same seed; after `close`, or an error in the constructor, nothing it started is left. Inside a leader, ranks
and engine processes that die are the engine's own business. For use by several threads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import queue
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Self

from phalanx import env
from phalanx.cluster import ray_calls
from phalanx.cluster.actor_pool import RayActorPool
from phalanx.cluster.messages import Progress, Request, Response
from phalanx.cluster.pool_state import PoolLimits
from phalanx.cluster.ray_config import RayConfig
from phalanx.cluster.ray_worker import Delta, Done, Failed, Item, Moved, RayWorker
from phalanx.cluster.resources import RayResources, current
from phalanx.config import EngineConfig, options_by_name
from phalanx.error_names import error_named
from phalanx.errors import ConfigError, EngineDead, InvalidRequest, PhalanxError
from phalanx.sampling_params import SamplingParams
from phalanx.vllm_options import without_ignored

log = logging.getLogger(__name__)

_GROUP = 32
"""Most requests that are sent to a leader in one call."""
_AT_ONCE = 4
"""Calls to each leader at the same time."""
_CONCURRENCY = 64
"""Calls that a leader can work on."""
_LOSSES = 4
"""A group is given up when so many leaders in a row were lost over it and none of its answers grew."""

_OPTIONS = {
    "num_cpus": 0,
    "max_concurrency": _CONCURRENCY,
    "max_restarts": 3,
    "max_task_retries": 5,
    "scheduling_strategy": "SPREAD",
}
"""Of leaders; their ranks take CPUs and GPUs of their own."""


@dataclass
class _Group:
    """Requests that go to a leader together."""

    requests: list[Request]
    progress: list[Progress]
    told: list[tuple[int, int]]
    """Characters and tokens that the reader of each stream has."""
    deltas: Callable[[Response], None] | None = None
    stop: threading.Event = field(default_factory=threading.Event)


class RayDistributedEngine:
    """`data_parallel_size` leaders, each the head of `tensor_parallel_size` × `pipeline_parallel_size` ranks.

    `worker_cls` is a subclass of RayWorker, plain or decorated with `@ray.remote(...)`; options that Phalanx does not
    know go to its constructor. `options` are those of `phalanx serve`; `actor_options` are Ray's, for the leaders.
    `model_name` None is the demo model. Without `use_ray` the worker runs in this process, its ranks below it.

    Uses what `setup_ray_resources` has set up (its group is given back for the ranks), or joins or starts a cluster as
    `ray_config` says. Raises ConfigError, CheckpointError, UnsupportedModel, NotEnoughMemory, in one message that
    names the node; nothing is left then.
    """

    def __init__(
        self,
        model_name: str | None = None,
        *,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        context_parallel_size: int = 1,
        data_parallel_size: int = 1,
        use_ray: bool = True,
        worker_cls: Any = None,
        ray_config: RayConfig | None = None,
        actor_options: dict[str, Any] | None = None,
        **options: Any,
    ):
        self._cls, decorated = ray_calls.plain_class(RayWorker if worker_cls is None else worker_cls)
        if not issubclass(self._cls, RayWorker):
            raise ConfigError(f"`worker_cls` is {self._cls.__name__}, which is no subclass of RayWorker.")
        sizes = {
            "tensor_parallel_size": tensor_parallel_size,
            "pipeline_parallel_size": pipeline_parallel_size,
            "context_parallel_size": context_parallel_size,
        }
        for name, size in {**sizes, "data_parallel_size": data_parallel_size}.items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ConfigError(f"`{name}` is {size!r}; it must be an integer of at least 1.")
        if self._cls is RayWorker:
            options = without_ignored(options)
        own = {name: value for name, value in options.items() if name not in options_by_name()}
        if self._cls is RayWorker and own:
            raise ConfigError(
                f"Unknown option '{next(iter(own))}'.", fix="Only a `worker_cls` may have its own options."
            )
        backend = {"distributed_executor_backend": "ray"} if use_ray else {}
        config = EngineConfig.from_options(**{"model": model_name, **backend, **sizes, **_known(options)})
        arguments = {"model_name": model_name, **backend, **sizes, **options}
        self._resources: RayResources | None = None
        """Ours, to be closed."""
        self._pool: RayActorPool | None = None
        self._local: RayWorker | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._closed = False
        self._patience = config.recovery.recovery_timeout
        try:
            if use_ray:
                wanted = {**_OPTIONS, **decorated, **(actor_options or {})}
                self._start(arguments, config, data_parallel_size, ray_config, wanted)
            else:
                self._local = self._cls(**arguments)
        except BaseException:
            self.close()
            raise
        self._threads = ThreadPoolExecutor(_AT_ONCE * data_parallel_size, thread_name_prefix="phalanx-ray-engine")

    def _start(
        self, arguments: dict[str, Any], config: EngineConfig, leaders: int, ray_config: RayConfig | None, wanted: Any
    ) -> None:
        resources = current()
        if resources is None or ray_config is not None:
            each = config.parallel.num_cpus_per_worker
            cpus = leaders * config.parallel.world_size * (1.0 if each is None else each)
            resources = RayResources(ray_config or RayConfig(use_placement_groups=False), at_least=cpus)
            self._resources = resources
        share = _share_of_cpus(resources, config, leaders * config.parallel.world_size)
        if share is not None:
            arguments = {**arguments, "num_cpus_per_worker": share}
        resources.give_back()
        environment = {**env.for_ranks(), "RAY_ADDRESS": resources.address}
        hang = config.recovery.hang_timeout + 5.0
        limits = PoolLimits(silent_after=3.0, hang_timeout=hang, restarts=max(0, int(wanted["max_restarts"])))
        self._pool = RayActorPool(
            self._cls, leaders, actor_options=wanted, pool_limits=limits, environment=environment, **arguments
        )

    @property
    def pool(self) -> RayActorPool:
        """The leaders: `scale` it, look at its health, or call methods of your own on an actor of it. Raises
        ConfigError without Ray."""
        if self._pool is None:
            raise ConfigError("This engine runs without Ray and has no pool.")
        return self._pool

    # Answers

    def generate(
        self, requests: Request | str | Sequence[Request | str], sampling: SamplingParams | None = None
    ) -> list[Response]:
        """One response a request, in order. `sampling` is for those without their own; None: the model's defaults.

        Raises InvalidRequest and other errors of a request, which end the whole call; EngineDead when no leader is
        left; PhalanxError when the `generate` of a `worker_cls` raises.
        """
        groups = self._groups(_listed(requests), sampling)
        if self._threads is None or self._closed:
            raise EngineDead("The engine is closed.")
        futures = [self._threads.submit(self._run, group) for group in groups]
        try:
            answers = [future.result() for future in futures]
        except BaseException:
            for group in groups:
                group.stop.set()
            for future in futures:
                future.cancel()
            raise
        return [response for answer in answers for response in answer]

    def generate_stream(
        self, requests: Request | str | Sequence[Request | str], sampling: SamplingParams | None = None
    ) -> Iterator[Response]:
        """Deltas of all answers as they come: `text` and `token_ids` are what is new of `request_id`, the last one has
        `finish_reason`. Closing the iterator ends the work. Raises as `generate`. A user's `generate` is not asked."""
        groups = self._groups(_listed(requests), sampling)
        if self._threads is None or self._closed:
            raise EngineDead("The engine is closed.")
        news: queue.SimpleQueue[Response | BaseException | None] = queue.SimpleQueue()

        def run(group: _Group) -> None:
            try:
                self._run(group)
                news.put(None)
            except BaseException as error:
                news.put(error)

        for group in groups:
            group.deltas = news.put
            self._threads.submit(run, group)
        left = len(groups)
        try:
            while left:
                item = news.get()
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    left -= 1
                else:
                    yield item
        finally:
            for group in groups:
                group.stop.set()

    def _groups(self, requests: list[Request], sampling: SamplingParams | None) -> list[_Group]:
        if sampling is not None and not isinstance(sampling, SamplingParams):
            raise InvalidRequest(f"`sampling` must be SamplingConfig, got {type(sampling).__name__}.")
        given = [request.request_id for request in requests if request.request_id is not None]
        if len(set(given)) < len(given):
            raise InvalidRequest("Two requests have the same `request_id`.", param="request_id")
        call = secrets.token_hex(4)
        prepared = [
            dataclasses.replace(
                request,
                request_id=request.request_id or f"{call}-{number}",
                sampling=request.sampling or sampling,
                progress=None,
            )
            for number, request in enumerate(requests)
        ]
        leaders = self._pool.num_actors if self._pool is not None else 1
        size = max(1, min(_GROUP, math.ceil(len(prepared) / max(1, leaders))))
        parts = [prepared[at : at + size] for at in range(0, len(prepared), size)]
        return [_Group(part, [Progress()] * len(part), [(0, 0)] * len(part)) for part in parts]

    # One group

    def _run(self, group: _Group) -> list[Response]:
        """Until it is answered, by as many leaders as it takes."""
        if self._local is not None:
            return self._read(group, self._local.answer(self._to_send(group), stream=group.deltas is not None))
        pool, work, losses = self.pool, float(len(group.requests)), 0
        while True:
            had = sum(len(progress.token_ids) for progress in group.progress)
            handle, index = pool.get_actor(work=work, timeout=self._patience)
            try:
                return self._ask(group, handle)
            except Exception as error:
                if not self._is_loss(error):
                    raise
                pool.suspect(index, handle)
                grown = sum(len(progress.token_ids) for progress in group.progress) > had
                losses = 0 if grown else losses + 1
                if losses >= _LOSSES:
                    raise EngineDead(
                        f"{losses} leaders in a row were lost while these requests ran; the last: "
                        f"{ray_calls.one_line(error, 200)}."
                    ) from None
            finally:
                pool.release_actor(index, work=work)
            if group.stop.is_set() or self._closed:
                raise EngineDead("The engine is closed.")

    def _is_loss(self, error: Exception) -> bool:
        from ray import exceptions

        return isinstance(error, exceptions.RayActorError | exceptions.WorkerCrashedError | exceptions.NodeDiedError)

    def _to_send(self, group: _Group) -> list[Request]:
        return [
            dataclasses.replace(request, progress=progress)
            for request, progress in zip(group.requests, group.progress, strict=True)
        ]

    def _ask(self, group: _Group, handle: Any) -> list[Response]:
        from ray import get

        sent = self._to_send(group)
        answers = handle.answer.options(num_returns="streaming", max_task_retries=0).remote(
            sent, stream=group.deltas is not None
        )
        finished = False
        try:
            responses = self._read(group, (get(reference) for reference in answers))
            finished = True
            return responses
        finally:
            if not finished:
                with contextlib.suppress(Exception):  # it may be the one that is lost
                    ids = [request.request_id for request in sent]
                    handle.abandon.options(concurrency_group=ray_calls.CONTROL, max_task_retries=0).remote(ids)

    def _read(self, group: _Group, answers: Iterator[list[Item]]) -> list[Response]:
        """What one leader says of a group."""
        repeated = list(group.told)
        for items in answers:
            if group.stop.is_set():
                raise EngineDead("Nobody waits for the answer any more.")
            for item in items:
                match item:
                    case Moved(position, progress):
                        group.progress[position] = group.progress[position].then(progress)
                    case Delta(position, response):
                        self._tell(group, position, response, repeated)
                    case Done(responses):
                        return responses
                    case Failed():
                        raise _raised(item)
        raise EngineDead("A leader ended its answer without saying why.")

    def _tell(self, group: _Group, position: int, response: Response, repeated: list[tuple[int, int]]) -> None:
        """Hand on what the reader does not have: a leader that takes over tells from the beginning."""
        characters, tokens = repeated[position]
        has_characters, has_tokens = group.told[position]
        known = (len(response.text[:characters]), len(response.token_ids[:tokens]))
        repeated[position] = (characters - known[0], tokens - known[1])
        response.text, response.token_ids = response.text[known[0] :], response.token_ids[known[1] :]
        group.told[position] = (has_characters + len(response.text), has_tokens + len(response.token_ids))
        if response.finish_reason is not None:
            made, usage = group.told[position][1], response.usage
            usage |= {"completion_tokens": made, "total_tokens": usage["prompt_tokens"] + made}
        else:
            response.usage = {}
        if group.deltas is not None and (response.text or response.token_ids or response.finish_reason):
            group.deltas(response)

    # What is known, and the end

    def get_stats(self, timeout: float = 5.0) -> list[dict[str, Any]]:
        """Each leader's `get_stats`, beside what its pool knows of it; those that do not answer in time say only
        that."""
        if self._local is not None:
            return [self._local.get_stats()]
        return self.pool.ask_all("get_stats", timeout)

    def close(self) -> None:
        """End everything the engine started. Idempotent. An engine that nobody refers to any more is closed."""
        if getattr(self, "_closed", True):
            return
        self._closed = True
        pool, self._pool = self._pool, None
        local, self._local = self._local, None
        resources, self._resources = self._resources, None
        if pool is not None:
            pool.close()
        if local is not None:
            local.close()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
        if resources is not None:
            resources.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _known(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name in options_by_name()}


def _share_of_cpus(resources: RayResources, config: EngineConfig, ranks: int) -> float | None:
    """CPUs for each rank where one each would leave less than half of those that are free; None: one each.

    Only on a cluster that was started here, which nobody else uses: its CPUs are this program's, which may want another
    engine beside this one. Ranks that share cores are slower, no more.
    """
    total = resources.ray.cluster_resources() if resources.started else {}
    if (
        config.parallel.num_cpus_per_worker is not None
        or not total
        or total.get("GPU")
        or config.model.device == "cuda"
    ):
        return None
    held = resources.config.bundle.get("CPU", 0.0) * resources.config.num_nodes if resources.group is not None else 0.0
    free = min(total.get("CPU", 0.0), resources.ray.available_resources().get("CPU", 0.0) + held)
    share: float = math.floor(free / 2 / ranks * 1000) / 1000
    if share >= 1 or share <= 0:
        return None
    log.info("%d ranks take %g of %g free CPUs each, so that another engine has room.", ranks, share, free)
    return share


def _listed(requests: Any) -> list[Request]:
    """Always a list of requests; a text is a request too. Raises InvalidRequest."""
    given = [requests] if isinstance(requests, Request | str) else requests
    if not isinstance(given, Sequence) or not all(isinstance(each, Request | str) for each in given):
        raise InvalidRequest("Requests must be Request objects or texts, one or a list of them.")
    return [Request(each) if isinstance(each, str) else each for each in given]


def _raised(failed: Failed) -> PhalanxError:
    if failed.kind:
        return error_named(failed.kind, failed.message, fix=failed.fix, param=failed.param, code=failed.code)
    return PhalanxError(f"{failed.message}.", fix="Mend the worker class, or use RayWorker.")
