"""When ranks run on Ray although nobody said so."""

from __future__ import annotations

import pytest

from phalanx.config import EngineConfig
from phalanx.engine import resolution
from phalanx.errors import ConfigError
from phalanx.executor import ray_session


def chosen(**options: object) -> str | None:
    config = resolution._with_ray(EngineConfig.from_options(**options))
    return config.parallel.distributed_executor_backend


@pytest.fixture(params=[True, False])
def there(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a Ray cluster is."""
    monkeypatch.setattr(ray_session, "is_running", lambda: request.param)
    return request.param


def test_several_nodes_that_do_not_say_where_they_meet_are_rays(there: bool) -> None:
    assert chosen(nnodes=2, tensor_parallel_size=2) == ("ray" if there else None)


@pytest.mark.parametrize(
    ("options", "backend"),
    [
        ({"tensor_parallel_size": 2}, None),
        ({"nnodes": 2, "tensor_parallel_size": 2, "master_addr": "10.0.0.1"}, None),
        ({"nnodes": 2, "tensor_parallel_size": 2, "distributed_executor_backend": "mp"}, "mp"),
    ],
)
def test_nothing_else_is(there: bool, options: dict[str, object], backend: str | None) -> None:
    assert chosen(**options) == backend


def test_replicas_on_ray_need_a_cluster(there: bool) -> None:
    options = {"data_parallel_size": 2, "distributed_executor_backend": "ray"}
    if there:
        assert chosen(**options) == "ray"
    else:
        with pytest.raises(ConfigError, match="no Ray cluster runs here"):
            chosen(**options)


def test_no_cluster_runs_where_ray_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_session.importlib.util, "find_spec", lambda name: None)
    assert not ray_session.is_running()
