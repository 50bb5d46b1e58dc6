"""What Ray's exceptions say of an actor that died, and what becomes of it. The texts are those of Ray 2.60, as it wrote
them when that was done to an actor; `tests/ray/test_deaths.py` does it to actors again."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from phalanx.config import EngineConfig
from phalanx.distributed.mesh import Mesh
from phalanx.executor.death import kind_of
from phalanx.executor.launcher import Layout
from phalanx.executor.placement import Site
from phalanx.executor.ray import RayLauncher
from phalanx.executor.ray_death import death_in_words, last_word
from phalanx.executor.ray_places import Place

exceptions = pytest.importorskip("ray.exceptions")

CRASHED = (
    "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker "
    "unexpectedly exits with a connection error code 2. End of file. Some common causes include: (1) the process was "
    "killed by the OOM killer due to high memory usage, (2) ray stop --force was called, or (3) the worker crashed "
    "unexpectedly due to SIGSEGV or another unexpected error. If the process was killed by the kernel OOM killer "
    "(verifiable by checking for OOM in dmesg of the OOMing node), consider enabling resource isolation via "
    "--enable-resource-isolation to prevent node deaths by resource contention and significant loss of progress by "
    "uninformed kernel OOM killing."
)
EXITED = (
    "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker "
    "exits unexpectedly. Worker exits with an exit code 3."
)
ENDED_ITSELF = (
    "The actor is dead because its worker process has died. Worker exit type: INTENDED_USER_EXIT Worker exit detail: "
    "Worker exits by an user request. Worker exits with an exit code 0. exit_actor() is called."
)
GROUP_REMOVED = (
    "The actor is dead because its worker process has died. Worker exit type: INTENDED_SYSTEM_EXIT Worker exit detail: "
    "Destroying worker since its placement group was removed. Placement group id: "
    "09616b470dd9c20adba54ae58e6901000000, bundle index: 0, lease id: 15000000661410c930ddaaafb7156513fb594318, actor "
    "id: df89e628ec1200c456c2ddf501000000, worker id: fea994b278e496c6af963dd694d703b7c13c56b6a4f8db3c277a20cc"
)
NODE_DIED = (
    "The actor died because its node has died. Node Id: cd1bc3b0ab691a11c78327ac5f842473a6c2c6ac40f9eb293f3fe09c\n"
    "\tthe actor's node was terminated unexpectedly: health check failed due to missing too many heartbeats"
)
MONITOR = (
    "2 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 10.77.0.11, ID: "
    "cd1bc3b0ab691a11c78327ac5f842473a6c2c6ac40f9eb293f3fe09c) was 0.57GB used / 0.68GB limit (0.839738)\n"
    "OOM kill reason: Memory usage 592957440B exceeded threshold of 587202560B (80.0% of 734003200B limit)\n"
    "Object store memory usage: [- objects spillable: 0\n- bytes spillable: 0]\n"
    "Ray killed 2 worker(s) based on the killing policy\n"
    "To see more information about memory usage on this node, use `ray logs raylet.out -ip 10.77.0.11`\n"
    "Refer to the documentation on how to address the out of memory issue: "
    "https://docs.ray.io/en/latest/ray-observability/user-guides/debug-apps/debug-memory.html."
)
RAISED = (
    "\x1b[36mray::RankActor.live()\x1b[39m (pid=6463, ip=10.77.0.11, actor_id=b1b5d3eabfbd7792bcfe001a01000000)\n"
    '  File "/phalanx/executor/ray_rank.py", line 96, in live\n    raise ValueError("no such thing")\n'
    "    ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^\nValueError: no such thing"
)


MONITORED = (
    "Ray's memory monitor ended it, because host1 was running out of memory "
    "(0.57 of 0.68 GB in use, it steps in at 80%)"
)


def died(text: str) -> Exception:
    """The exception that a call of a dead actor raises, made as Ray makes it."""
    from ray.core.generated.common_pb2 import ActorDiedErrorContext

    context = ActorDiedErrorContext(
        error_message=text, class_name="RankActor", actor_id=b"\1" * 16, pid=6505, node_ip_address="10.77.0.11"
    )
    return exceptions.ActorDiedError(context)


def raised(says: str = "no such thing") -> Exception:
    text = RAISED.replace("ValueError: no such thing", f"ValueError: {says}")
    return exceptions.RayTaskError("RankActor.live", text, ValueError(says))


@pytest.mark.parametrize(
    ("error", "words", "kind"),
    [
        pytest.param(
            lambda: exceptions.OutOfMemoryError(MONITOR), MONITORED, "out_of_memory", id="the memory monitor"
        ),
        pytest.param(lambda: died(MONITOR), MONITORED, "out_of_memory", id="the memory monitor, asked again later"),
        pytest.param(
            lambda: died(CRASHED),
            "its actor's process on host1 was killed or crashed; Ray saw its connection end",
            "killed", id="SIGKILL, SIGSEGV, abort, os._exit",
        ),
        pytest.param(lambda: died(EXITED), "its actor's process on host1 ended with status 3", "ended", id="exit"),
        pytest.param(
            lambda: died(ENDED_ITSELF), "its actor's process on host1 ended with status 0", "ended", id="exit_actor"
        ),
        pytest.param(
            lambda: died("The actor is dead because it was killed by `ray.kill`."),
            "its actor was ended by ray.kill",
            "killed", id="ray.kill",
        ),
        pytest.param(
            lambda: died(GROUP_REMOVED),
            "its actor is gone: somebody removed its placement group",
            "ended", id="the placement group",
        ),
        pytest.param(
            lambda: died(NODE_DIED),
            "its node host1 is gone: terminated unexpectedly: health check failed due to missing too many heartbeats",
            "network", id="the node",
        ),
        pytest.param(
            lambda: exceptions.NodeDiedError(
                "Task failed because the node it was running on is dead or unavailable. Node IP: 10.77.0.11"
            ),
            "its node host1 is gone: Ray lost it",
            "network", id="the node, while a task ran",
        ),
        pytest.param(
            lambda: exceptions.ActorUnavailableError(
                "The actor is temporarily unavailable: RpcError: RPC error: Socket closed rpc_code: 14", b"\1" * 16
            ),
            "its actor's connection ended; Ray does not know yet whether the process or its node host1 is gone",
            "network", id="the node, at first",
        ),
        pytest.param(raised, "its actor failed: ValueError: no such thing", "failed", id="a method raised"),
        pytest.param(
            lambda: exceptions.ActorDiedError(raised()),
            "its actor failed: ValueError: no such thing",
            "failed", id="the constructor raised",
        ),
        pytest.param(
            lambda: exceptions.ActorDiedError(raised("the node has died, a worker process has died")),
            "its actor failed: ValueError: the node has died, a worker process has died",
            "failed", id="what it raised sounds like Ray",
        ),
        pytest.param(
            lambda: raised("running low on memory\nhint: buy some"),
            "its actor failed: ValueError: running low on memory",
            "failed", id="what it raised has several lines",
        ),
        pytest.param(
            exceptions.ActorDiedError,
            "its actor is gone: The actor died unexpectedly before finishing this task",
            "ended", id="Ray does not know",
        ),
    ],
)  # fmt: skip
def test_words(error, words, kind):
    said = death_in_words(error(), "host1")
    assert said == words
    assert kind_of(said) == kind


class Actor:
    """Its calls end with these, one after the other."""

    def __init__(self, *ends: object):
        self.ends, self.__ray_ready__ = list(ends), SimpleNamespace(remote=lambda: self)


def get(actor: Actor, timeout: float) -> object:
    end = actor.ends.pop(0)
    if isinstance(end, Exception):
        raise end
    return end


@pytest.mark.parametrize(
    ("end", "known"),
    [
        pytest.param(lambda: died(CRASHED), True, id="it knows now"),
        pytest.param(lambda: exceptions.OutOfMemoryError(MONITOR), True, id="it was the monitor"),
        pytest.param(lambda: exceptions.GetTimeoutError("Get timed out"), False, id="not in time"),
        pytest.param(lambda: True, False, id="it is there again"),
    ],
)
def test_what_ray_does_not_know_yet_is_asked_for_again(end, known):
    ray = SimpleNamespace(exceptions=exceptions, get=get)
    first, then = exceptions.ActorUnavailableError("Socket closed", None), end()
    unsure = exceptions.ActorUnavailableError("Connection refused", None)
    assert last_word(ray, Actor(then), first, 9.0) is (then if known else first)
    assert last_word(ray, Actor(unsure, then), first, 9.0) is (then if known else unsure)
    assert last_word(ray, Actor(), first, 0.0) is first  # there is no time to ask
    certain = died(CRASHED)
    assert last_word(ray, Actor(), certain, 9.0) is certain  # and nobody is asked


def test_a_launcher_waits_no_longer_than_it_is_told_to(monkeypatch):
    now = 0.0

    def wait(asked, timeout):
        nonlocal now
        now += 0.4
        return asked, []

    def get(asked, timeout=None):
        nonlocal now
        if timeout is None:
            raise exceptions.ActorUnavailableError("Socket closed", None)
        now += timeout
        raise exceptions.GetTimeoutError("Get timed out")

    for module in ("ray", "ray_death"):
        monkeypatch.setattr(f"phalanx.executor.{module}.time", SimpleNamespace(monotonic=lambda: now))
    place = Place(None, 0, Site("a", "host1", {}, {}), actor=Actor(), life=object())
    places = SimpleNamespace(places={0: place}, ray=SimpleNamespace(exceptions=exceptions, wait=wait, get=get))
    launcher = RayLauncher(EngineConfig(), Layout(Mesh()), places=places)
    assert "Ray does not know yet" in launcher.cause(0, 0.5)
    assert now == pytest.approx(0.5)


def test_the_monitor_is_not_taken_for_the_kernel():
    """Ray's text for a process that the kernel killed speaks of its OOM killer, as of any process that vanished."""
    assert "OOM killer" in str(died(CRASHED)) and "memory" not in death_in_words(died(CRASHED), "host1")
    assert "kernel" not in death_in_words(exceptions.OutOfMemoryError(MONITOR), "host1")
