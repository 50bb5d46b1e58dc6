"""Declared devices: what is understood, what is refused with one clear error, and what this machine has."""

import os
import stat

import pytest

from phalanx.errors import ConfigError
from phalanx.planner.devices import Device, declared, of_this_machine
from phalanx.worker.limits import Memory

GIB = 2**30


def test_one_device_with_everything():
    (device, again) = declared(["name=a10, memory=24G, used=40%, speed=600g, node=n1, count=2"])
    assert device == again == Device("a10", "cuda", Memory(24 * GIB, 24 * GIB - int(24 * GIB * 0.4)), 600e9, "n1")


def test_devices_stay_in_order_and_used_may_be_bytes():
    devices = declared(["name=b,memory=20G,used=2G", "name=a,memory=1g,count=2"])
    assert [(d.name, d.memory.available) for d in devices] == [("b", 18 * GIB), ("a", 10**9), ("a", 10**9)]


def test_a_variable_is_cut_at_commas_and_means_the_same():
    parts = ("name=a", "memory=1G", "count=2", "name=b", "memory=2G")
    assert declared(parts) == declared(["name=a,memory=1G,count=2", "name=b,memory=2G"])


def test_a_file(tmp_path):
    file = tmp_path / "devices.yaml"
    file.write_text("- {name: a, memory: 24G, used: 10%}\n- name: b\n  memory: 1073741824\n  count: 2\n")
    assert declared([str(file)]) == declared(["name=a,memory=24G,used=10%", "name=b,memory=1G,count=2"])
    file.write_text("devices:\n- {name: a, memory: 24G, speed: 6.0e+11}\n")
    assert declared([str(file)])[0].speed == 6e11


def test_cpus_and_gpus_by_name_or_by_the_device_option():
    assert declared(["name=cpu-a,memory=1G"])[0].kind == "cpu"
    assert declared(["name=h200,memory=1G"])[0].kind == "cuda"
    assert declared(["name=h200,memory=1G"], kind="cpu")[0].kind == "cpu"
    with pytest.raises(ConfigError, match="one kind"):
        declared(["name=cpu,memory=1G", "name=gpu,memory=1G"])


@pytest.mark.parametrize(
    ("item", "complaint"),
    [
        ("name=a", "no memory"),
        ("memory=1G", "no name"),
        ("name=a,memory=much", "memory: 'much' is not a size"),
        ("name=a,memory=0", "has no memory"),
        ("name=a,memory=1G,memroy=1G", "Did you mean 'memory'"),
        ("name=a,memory=1G,colour=red", "It has name, memory"),
        ("name=a,memory=1G,memory=2G", "given twice"),
        ("name=a,memory=", "has no value"),
        ("name=a,memory=1G,used=100%", "nothing free"),
        ("name=a,memory=1G,used=2G", "nothing free"),
        ("name=a,memory=1G,used=-1%", "not a size"),
        ("name=a,memory=1G,used=1e3%", "not a size"),
        ("name=a,memory=1G,speed=0", "speed 0"),
        ("name=a,memory=1G,speed=fast", "speed: 'fast'"),
        ("name=a,memory=1G,count=0", "'0' times"),
        ("name=a,memory=1G,count=-2", "'-2' times"),
        ("name=a,memory=1G,count=99999", "'99999' times"),
        ("name=a,memory=1G,speed=1g,name=b,memory=1G", "The device b has no speed"),
        ("nothing-here.yaml", "cannot read the file"),
        ("", "cannot read the file"),
    ],
)
def test_what_is_no_device(item, complaint):
    with pytest.raises(ConfigError) as caught:
        declared([item])
    assert complaint in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "a: b",
        "[]",
        "3",
        "- 1",
        "[[1]]",
        "- {name: [a], memory: 1G}",
        "- {name: a, memory: true}",
        "a: {",
        "- !!python/x y",
    ],
)
def test_files_that_hold_no_devices(text, tmp_path):
    file = tmp_path / "d.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        declared([str(file)])
    assert "d.yaml" in str(caught.value) or "--declare-device" in str(caught.value)


def test_too_many():
    with pytest.raises(ConfigError, match="More than 4096"):
        declared(["name=a,memory=1G,count=4000", "name=a,memory=1G,count=97"])


def test_ranks_of_this_machine_share_its_memory_equally():
    devices = of_this_machine("cpu", 3, Memory(30, 20), node="here")
    assert devices == (Device("cpu", "cpu", Memory(10, 6), None, "here"),) * 3


def test_gpus_are_asked_of_the_drivers_tool(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA A10, 23028, 22000'\necho 'NVIDIA T4, 15360, 15000'\necho broken\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    a10 = Device("NVIDIA A10", "cuda", Memory(23028 * 2**20, 22000 * 2**20), None, "n")
    t4 = Device("NVIDIA T4", "cuda", Memory(15360 * 2**20, 15000 * 2**20), None, "n")
    ask = {"host": Memory(1, 1), "node": "n"}
    assert of_this_machine("cuda", 2, **ask) == (a10, t4)
    assert of_this_machine("cuda", 1, **ask, gpus=[1, 0]) == (t4,)
    assert of_this_machine("cuda", 3, **ask) is None
    tool.write_text("#!/bin/sh\nexit 1\n")
    assert of_this_machine("cuda", 1, **ask) is None
