"""`RayConfig`: its defaults, and one clear message for each mistake."""

from __future__ import annotations

import pytest

from phalanx.cluster.ray_config import RayConfig
from phalanx.errors import ConfigError


def test_the_defaults():
    config = RayConfig()
    assert (config.address, config.num_cpus, config.num_gpus, config.resources) == ("auto", 0, 0, {})
    assert config.temp_dir is None and config.use_placement_groups and config.placement_strategy == "PACK"
    assert (config.cpus_per_node, config.gpus_per_node, config.memory_per_node, config.num_nodes) == (8, 1, 64, 1)
    assert config.cudnn_benchmark and not config.cudnn_deterministic
    assert config.memory_fraction == 0.9 and config.gpu_ids is None
    assert config.bundle == {"CPU": 8, "GPU": 1, "memory": 64e9}


def test_a_bundle_has_only_what_is_asked():
    assert RayConfig(gpus_per_node=0, memory_per_node=0.5).bundle == {"CPU": 8, "memory": 5e8}


def test_later_changes_of_the_callers_mapping_change_nothing():
    given = {"fast": 1}
    config = RayConfig(resources=given)
    given["fast"] = 2
    assert config.resources == {"fast": 1}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"address": ""}, "`address` must be a text"),
        ({"address": "ray://host:10001"}, "a Ray client cannot hold workers"),
        ({"address": "host"}, "'auto', 'local', or the head's host:port"),
        ({"address": "host:70000"}, "host:port"),
        ({"num_cpus": -1}, "`num_cpus` is -1; it must be at least 0"),
        ({"num_cpus": 1.5}, "`num_cpus` must be an integer, got 1.5"),
        ({"num_gpus": True}, "`num_gpus` must be an integer, got True"),
        ({"num_nodes": 0}, "`num_nodes` is 0; it must be at least 1"),
        ({"cpus_per_node": float("nan")}, "`cpus_per_node` is nan"),
        ({"memory_per_node": "64"}, "`memory_per_node` must be a number"),
        ({"placement_strategy": "pack"}, "Choose one of PACK, SPREAD"),
        ({"resources": ["fast"]}, "must be a mapping"),
        ({"resources": {"GPU": 1}}, "Use num_cpus or num_gpus"),
        ({"resources": {"fast": -1}}, "`resources['fast']` is -1"),
        ({"temp_dir": 3}, "`temp_dir` must be a text"),
        ({"use_placement_groups": 1}, "`use_placement_groups` must be True or False"),
        ({"cudnn_benchmark": "yes"}, "`cudnn_benchmark` must be True or False"),
        ({"memory_fraction": 0}, "above 0 and at most 1"),
        ({"memory_fraction": 1.01}, "above 0 and at most 1"),
        ({"gpu_ids": "0,1"}, "must be a list of GPU numbers"),
        ({"gpu_ids": [0, 0]}, "Name each GPU once"),
        ({"gpu_ids": []}, "Name each GPU once"),
        ({"gpu_ids": [0], "num_gpus": 2}, "`num_gpus` is 2, but `gpu_ids` names 1"),
        ({"cpus_per_node": 0, "gpus_per_node": 0, "memory_per_node": 0}, "bundles would be empty"),
    ],
)
def test_mistakes(values, said):
    with pytest.raises(ConfigError) as caught:
        RayConfig(**values)
    assert said in str(caught.value) and "\n" not in str(caught.value)
