"""What a cluster that cannot be used says: one line in seconds, of a real Ray with a token, and nothing is left."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.helpers.ray_cluster import RayCluster, ray_cluster

pytestmark = pytest.mark.slow

PROGRAM = """
import sys
import ray
from phalanx.cluster import RayConfig, setup_ray_resources
from phalanx.errors import ConfigError
exec(sys.argv[2])
try:
    setup_ray_resources(RayConfig(address=sys.argv[1], use_placement_groups=False))
except ConfigError as error:
    print("refused:", error)
else:
    print("joined")
assert not ray.is_initialized() or sys.argv[2] == ""
"""
TOKEN = "a" * 64


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    from ray._private.authentication_test_utils import reset_auth_token_state

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", TOKEN)
        reset_auth_token_state()  # Ray reads it once in a process, where other tests have clusters too
        with ray_cluster(a={"num_cpus": 1}) as made:
            yield made
    reset_auth_token_state()


def asked(cluster: RayCluster, before: str = "", **variables: str | None) -> str:
    wanted = {**os.environ, **cluster.settings, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN, **variables}
    environment = {name: value for name, value in wanted.items() if value is not None}
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, cluster.address, before],
        capture_output=True, text=True, timeout=100, env=environment,
    )  # fmt: skip
    print(f"{time.monotonic() - began:.1f} s", done.stdout, done.stderr[-500:])
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


def test_who_has_the_token_and_the_versions_joins(cluster: RayCluster) -> None:
    assert asked(cluster) == "joined"


@pytest.mark.parametrize(
    "variables", [{"RAY_AUTH_TOKEN": "b" * 64}, {"RAY_AUTH_TOKEN": None, "HOME": "/nonexistent"}], ids=["wrong", "none"]
)
def test_a_token_that_is_wrong_or_missing(cluster: RayCluster, variables: dict[str, str | None]) -> None:
    said = asked(cluster, **variables)
    assert said.startswith(f"refused: The Ray cluster at {cluster.address}") and "RAY_AUTH_TOKEN" in said


@pytest.mark.parametrize(
    ("before", "words"),
    [
        ("ray.__version__ = '2.99.0'", "2.99.0"),
        ("import ray._private.utils as u; u.compute_version_info = lambda: (ray.__version__, '3.99.1')", "3.99.1"),
    ],
    ids=["Ray", "Python"],
)
def test_other_versions(cluster: RayCluster, before: str, words: str) -> None:
    said = asked(cluster, before)
    assert said.startswith(f"refused: The Ray cluster at {cluster.address} has other versions than this process")
    assert words in said and "Use the same versions of Ray and Python on all nodes" in said
