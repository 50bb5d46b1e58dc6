"""What Ray makes of the class of leaders."""

from __future__ import annotations

import pytest

from phalanx.cluster.ray_worker import RayWorker


def test_ray_runs_the_calls_of_a_leader_side_by_side() -> None:
    """An actor with an `async` method is one event loop to it: other methods would wait for each other there."""
    compat = pytest.importorskip("ray._private.async_compat")
    assert not compat.has_async_methods(RayWorker)
