"""Faults are parsed as they are written, happen where they are told to, and once where a file lets them off."""

import os
import subprocess
import sys

import pytest

from phalanx import fault_point
from phalanx.errors import ConfigError
from phalanx.fault_point import Fault, InjectedFault, parse, reach, skippable
from phalanx.step import Admission, SamplingState, StepPlan, pack


def test_words():
    assert parse("at=after_commit,step=7,do=kill; at=step,rank=1,life=2,do=sleep=0.5") == (
        Fault("after_commit", "kill", step=7),
        Fault("step", "sleep", 0.5, rank=1, life=2),
    )


def test_what_can_be_left_out(monkeypatch):
    monkeypatch.setattr(fault_point, "_faults", parse("at=step,rank=1,do=skip; at=exchange,rank=0,do=skip"))
    assert [reach("step", rank=rank) for rank in (0, 1)] == [False, True]
    assert [skippable(lambda number: number + 1, rank=rank)(5) for rank in (0, 1)] == [5, 6]
    with pytest.raises(ConfigError, match="is no fault"):
        parse("at=after_commit,do=skip")


@pytest.mark.parametrize("text", ["do=kill", "at=nowhere,do=kill", "at=step,do=harm", "at=step,rank=x,do=kill", "step"])
def test_what_is_no_fault(text):
    with pytest.raises(ConfigError, match="is no fault"):
        parse(text)


def test_only_there(monkeypatch):
    monkeypatch.setattr(fault_point, "_faults", parse("at=step,rank=1,step=3,do=raise"))
    reach("load", rank=1, step=3)
    reach("step", rank=0, step=3)
    reach("step", rank=1, step=2)
    with pytest.raises(InjectedFault):
        reach("step", rank=1, step=3)


def test_a_file_lets_it_off_once(monkeypatch, tmp_path):
    trigger = tmp_path / "now"
    monkeypatch.setattr(fault_point, "_faults", parse(f"at=step,do=raise,file={trigger}"))
    reach("step")
    trigger.touch()
    reach("load")
    with pytest.raises(InjectedFault):
        reach("step")
    assert not trigger.exists()
    reach("step")


def test_as_long_as_a_file_is_there(monkeypatch, tmp_path):
    lasting = tmp_path / "slow"
    monkeypatch.setattr(fault_point, "_faults", parse(f"at=step,do=raise,while={lasting}"))
    reach("step")
    lasting.touch()
    for _ in range(2):
        with pytest.raises(InjectedFault):
            reach("step")
    lasting.unlink()
    reach("step")


def test_the_third_time_from_when_a_file_is_there(monkeypatch, tmp_path):
    trigger = tmp_path / "now"
    monkeypatch.setattr(fault_point, "_faults", parse(f"at=step,do=raise,after=2,file={trigger}"))
    for _ in range(3):
        reach("step")
    trigger.touch()
    reach("step")
    reach("step")
    with pytest.raises(InjectedFault):
        reach("step")


def test_at_steps_that_take_in_a_certain_prompt(monkeypatch):
    monkeypatch.setattr(fault_point, "_faults", parse("at=step,prompt=7,do=raise"))
    for plan in (None, StepPlan(0, 1), StepPlan(0, 2, [admission([1, 2, 7], prompt=2), admission([5], prompt=1)])):
        reach("step", plan=plan)
    for _ in range(2):
        with pytest.raises(InjectedFault):
            reach("step", plan=StepPlan(0, 3, [admission([5], prompt=1), admission([1, 7, 2], prompt=2)]))


def admission(tokens, *, prompt):
    return Admission(0, pack(tokens), prompt, 0, b"", SamplingState())


def test_where_something_may_happen(monkeypatch):
    monkeypatch.setattr(fault_point, "_faults", parse("at=exchange,rank=1,do=skip; at=load,do=kill"))
    assert [fault_point.armed("exchange", rank=rank) for rank in (0, 1)] == [False, True]
    assert fault_point.armed("load", rank=0) and not fault_point.armed("step", rank=0)


@pytest.mark.parametrize(
    ("deed", "status"), [("kill", -9), ("abort", -6), ("segfault", -11), ("exit", 0), ("raise", 1), ("sleep=0.01", 3)]
)
def test_deeds(deed, status):
    program = "import sys; from phalanx.fault_point import reach; reach('load'); sys.exit(3)"
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PHALANX_FAULT": f"at=load,do={deed}"}, capture_output=True
    )
    assert done.returncode == status, done.stderr
