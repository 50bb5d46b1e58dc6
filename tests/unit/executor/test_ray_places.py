"""What actors are asked of themselves, and what becomes of places whose ranks have ended, without Ray."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest

from phalanx.config import EngineConfig
from phalanx.distributed.mesh import Mesh
from phalanx.executor import ray_places
from phalanx.executor.launcher import Layout
from phalanx.executor.placement import Site
from phalanx.executor.ray import RayLauncher
from phalanx.executor.ray_places import Place, RayPlaces
from phalanx.executor.ray_rank import Introduction
from phalanx.worker.capacity import Capacity


class Actor:
    """Says what it is told to; keeps whether it was to measure."""

    def __init__(self, capacity: Capacity | None):
        self.asked: list[bool] = []
        self.introduce = SimpleNamespace(remote=self._introduce)
        self._capacity = capacity

    def _introduce(self, config: bytes, towards: str, measuring: bool) -> bytes:
        self.asked.append(measuring)
        said = Introduction("host", "node", 1, {}, capacity=self._capacity if measuring else None)
        return msgspec.msgpack.encode(said)


@pytest.mark.parametrize("shared", [True, False])
def test_what_ranks_of_a_node_share_is_measured_once(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not while a stream waits for a rank that takes the place of a lost one."""
    monkeypatch.setenv("PHALANX_HOST_IP", "127.0.0.1")
    config, measured = EngineConfig(), Capacity("device", 8, 4, 1.0, shared=shared)
    places = RayPlaces(Mesh(tp=3), config.parallel, "cpu")
    ray = SimpleNamespace(wait=lambda *_, **__: None, get=lambda answer, timeout: answer)
    places._session = SimpleNamespace(ray=ray)  # type: ignore[assignment]
    actors = [Actor(measured) for _ in range(3)]
    for rank, node in enumerate("aab"):
        places.places[rank] = Place(None, 0, Site(node, node, {}, {}), actor=actors[rank])
    for rank in range(3):
        places.introduce([rank], config)
    assert [actor.asked for actor in actors] == [[True], [not shared], [True]]
    assert [place.said and place.said.capacity for place in places.places.values()] == [measured] * 3


def test_a_silent_node_is_asked_once_for_all_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each question takes half a second, in which streams wait."""
    asked: list[str] = []
    monkeypatch.setattr(ray_places, "_answers", lambda node, seconds: asked.append(node) or node == "b")
    monkeypatch.setattr(RayPlaces, "view", SimpleNamespace(alive=lambda: {"a": "a", "b": "b"}))
    places = RayPlaces(Mesh(tp=3), EngineConfig().parallel, "cpu")
    ranks = [Place(None, 0, Site(node, node, {}, {})) for node in "aaabbc"]
    assert [places.reaches(rank) for rank in ranks] == [False, False, False, True, True, False]
    assert asked == ["a", "b", "b"]
    monkeypatch.setattr(ray_places, "_MUTE_S", 0.0)
    assert not places.reaches(ranks[0]) and asked[3:] == ["a"]


@pytest.mark.parametrize(
    ("cause", "usable"),
    [
        ("it was killed by SIGKILL", {0, 1}),
        ("it ended with status 0 (the executor has not answered for 2.4 s: the network or its node is down)", {0}),
    ],
)
def test_a_place_whose_rank_heard_nothing_is_not_used_again(
    cause: str, usable: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That it ended is heard from there: the link is half open, and an order to its actor would be waited for in
    vain. Ray calls its node alive for long."""
    pytest.importorskip("ray")
    nodes = [{"NodeID": name, "Alive": True} for name in "ab"]
    killed: list[str] = []
    ray = SimpleNamespace(
        exceptions=SimpleNamespace(RayError=RuntimeError),
        get=str,
        get_runtime_context=lambda: SimpleNamespace(get_node_id=lambda: "a"),
        kill=lambda actor, no_restart: killed.append(actor),
        nodes=lambda: nodes,
        wait=lambda lives, timeout: ([life for life in lives if life != "runs"], []),
    )
    monkeypatch.setattr("phalanx.executor.ray_view.RayView.nodes", lambda self: [])  # no room anywhere
    mesh = Mesh(tp=2)
    places = RayPlaces(mesh, EngineConfig().parallel, "cpu")
    places._session = SimpleNamespace(ray=ray, started=False)  # type: ignore[assignment]
    for rank, life in enumerate(("runs", cause)):
        node = "ab"[rank]
        places.places[rank] = Place(None, 0, Site(node, node, {}, {}), actor=f"actor {rank}", life=life)
    launcher = RayLauncher(EngineConfig(), Layout(mesh), places=places)
    assert launcher.cause(0) is None and launcher.cause(1) == cause
    assert launcher.available() == usable
    assert killed == ["actor 1"] * (1 not in usable)
