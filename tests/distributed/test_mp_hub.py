"""Who may join a hub, what it makes of nonsense, and where ranks run."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import time

import pytest

from phalanx import env
from phalanx.config import EngineConfig
from phalanx.distributed.address import Address, node_id
from phalanx.distributed.mesh import Mesh
from phalanx.distributed.transports.abort import Abort, GroupBroken
from phalanx.distributed.transports.secure_stream import SecureStream
from phalanx.errors import ConfigError, NotEnoughMemory
from phalanx.executor import deadlines, members, multiprocess
from phalanx.executor.base import CacheLayout, WorkerDied
from phalanx.executor.hub import HubExecutor
from phalanx.executor.launcher import Layout
from phalanx.executor.messages import MESSAGE, RESULT, AbortEpoch, Begin, Failed, Join, Progress, encode
from phalanx.executor.multiprocess import core_plan, place_ranks
from phalanx.step import StepPlan
from tests.helpers.fake_ranks import FakeLauncher, FakeRank
from tests.helpers.plans import Run, admission, answer, plan
from tests.helpers.processes import wait_until
from tests.helpers.rank_processes import launcher, mp_executor, pids
from tests.helpers.unix_calls import connect
from tests.helpers.worker_model import engine_config


@pytest.fixture(scope="module")
def config(rank_model):
    return engine_config(rank_model)


@pytest.fixture
def executor(supervisor, config):
    executor = mp_executor(supervisor, Mesh(tp=2))
    yield executor
    executor.close()


@pytest.fixture
def started(executor, config):
    executor.start(config)
    return executor


def works(executor, epoch: int = 0) -> bool:
    admit = [admission(0, [3, 4], [0])]
    return bool(answer(executor.submit(plan([Run(0, 2)], admit=admit, epoch=epoch)).result()).tokens)


def call(executor) -> socket.socket:
    return connect(executor._watch.address.unix)


def introduce(executor, key: bytes, rank: int) -> SecureStream:
    stream = SecureStream(call(executor), Abort(), "the hub")
    stream.handshake(key, client=True, encrypt=False, timeout=10)
    join = Join(Address(rank, node_id(), "nowhere"), os.getpid(), "here", {})
    stream.send(MESSAGE, encode(join), 10)
    return stream


class TestStrangers:
    def test_without_the_key_are_turned_away(self, started, caplog):
        with caplog.at_level(logging.WARNING, "phalanx"), pytest.raises(GroupBroken):
            introduce(started, b"x" * 32, 0)
        assert works(started)

    def test_who_speak_another_language_are_turned_away(self, started):
        with call(started) as sock:
            sock.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + b"x" * 200)
            with contextlib.suppress(ConnectionResetError):
                assert sock.recv(100) == b""
        assert works(started)

    def test_who_say_nothing_hold_nobody_up(self, executor, config, monkeypatch):
        monkeypatch.setattr(members, "_KNOCK_S", 0.5)
        silent = []
        start = launcher(executor).launch

        def launch(starts):
            silent.extend(call(executor) for _ in range(20))
            start(starts)

        monkeypatch.setattr(launcher(executor), "launch", launch)
        executor.start(config)
        assert works(executor)
        for sock in silent:
            assert sock.recv(1) == b""  # dropped after a while
            sock.close()

    def test_are_never_too_many(self, started, monkeypatch):
        monkeypatch.setattr(members, "_CALLERS", 8)
        callers = [call(started) for _ in range(30)]
        assert wait_until(lambda: len(started._watch._talks) <= 2 + 8, 30)
        assert works(started)
        for sock in callers:
            sock.close()

    @pytest.mark.parametrize("rank", [0, 1, 2, -1, 10**6])
    def test_with_the_key_cannot_take_a_rank_that_is_there_or_none(self, started, rank):
        stream = introduce(started, started._key, rank)
        with pytest.raises(GroupBroken):
            stream.receive(1000, 10)
        assert works(started)


@pytest.fixture
def fakes():
    return FakeLauncher()


@pytest.fixture
def over_fakes(fakes):
    executor = HubExecutor(fakes, Layout(Mesh(tp=2)))
    yield executor
    executor.close()


class TestOddRanks:
    def test_those_that_behave_give_the_least_of_blocks_and_the_sum_of_bytes(self, over_fakes):
        layout = over_fakes.start(EngineConfig())
        assert layout == CacheLayout(blocks=10, block_size=16, bytes_per_block=201, vocab_size=50)
        futures = [over_fakes.submit(StepPlan(0, step)) for step in range(3)]
        over_fakes._members[1].stream.shut()  # does not report, but is needed
        with pytest.raises(WorkerDied, match="Worker 1 on elsewhere died: its connection ended"):
            [future.result() for future in (*futures, over_fakes.submit(StepPlan(0, 4)))]

    @pytest.mark.parametrize("content", [b"", b"\xc1", b"\x81\xa4type\xa4none", b"\x00" * 1000])
    def test_nonsense_instead_of_a_message_ends_the_rank(self, fakes, over_fakes, content):
        def speak(rank: FakeRank) -> None:
            if rank.rank == 1:
                rank.stream.send(MESSAGE, content, 10)

        fakes.on_start = speak
        with pytest.raises(WorkerDied, match=r"Worker 1 .*its connection ended before it could"):
            over_fakes.start(EngineConfig())

    def test_nonsense_instead_of_a_result_ends_the_epoch(self, fakes, over_fakes):
        over_fakes.start(EngineConfig())
        for rank in fakes.ranks.values():
            rank.step = lambda plan, rank=rank: rank.stream.send(RESULT, b"\xc1", 10)
        with pytest.raises(WorkerDied):
            over_fakes.submit(StepPlan(0, 1)).result()
        for rank in fakes.ranks.values():
            rank.step = rank.compute
        over_fakes.restart(1)
        assert over_fakes.submit(StepPlan(1, 2)).result().step_id == 2

    def test_a_result_of_an_older_epoch_is_not_taken(self, fakes, over_fakes):
        over_fakes.start(EngineConfig())
        late = over_fakes.submit(StepPlan(0, 1))
        over_fakes.restart(1)
        reporter = fakes.ranks[0]
        reporter.compute(StepPlan(0, 1))
        result = over_fakes.submit(StepPlan(1, 2)).result()
        assert (late.cancelled(), result.epoch, result.step_id) == (True, 1, 2)

    def test_one_that_loads_when_another_dies_is_waited_for(self, fakes, over_fakes, monkeypatch):
        """It keeps what it has loaded; one that shows no progress is replaced."""
        monkeypatch.setattr(deadlines, "SETTLE_S", 2.0)
        over_fakes.start(EngineConfig())
        busy = fakes.ranks[1]

        def go_on_for_a_while(message) -> None:
            if isinstance(message, AbortEpoch):
                for share in range(10):
                    time.sleep(0.3)
                    busy.say(Progress("weights", share / 10))
            busy.answer(message)

        busy.hear = go_on_for_a_while
        over_fakes.restart(1)
        assert (fakes.started, fakes.killed) == ([0, 1], [])
        busy.hear = lambda message: None if isinstance(message, AbortEpoch) else busy.answer(message)
        over_fakes.restart(2)
        assert (fakes.started, fakes.killed) == ([0, 1, 1], [1])
        assert [status.state for status in over_fakes.check_health()] == ["ready", "ready"]

    def test_one_that_fails_first_is_named_and_not_those_that_notice(self, fakes, over_fakes):
        over_fakes.start(EngineConfig())

        def notice(plan: StepPlan) -> None:
            fakes.ranks[0].say(Failed(0, "PhalanxError", "Rank 1 has left.", secondary=True))

        def fail(plan: StepPlan) -> None:
            time.sleep(0.2)
            fakes.ranks[1].say(Failed(0, "PhalanxError", "ValueError: the true cause"))

        fakes.ranks[0].step, fakes.ranks[1].step = notice, fail
        with pytest.raises(WorkerDied, match="Worker 1 on elsewhere died: ValueError: the true cause"):
            over_fakes.submit(StepPlan(0, 1)).result()

    def test_what_a_user_can_mend_keeps_its_kind(self, fakes, over_fakes):
        def refuse(rank: FakeRank) -> None:
            def hear(message) -> None:
                if isinstance(message, Begin) and rank.rank == 1:
                    rank.say(Failed(0, "NotEnoughMemory", "It needs more.", fix="Give more.", code="not_enough_memory"))
                else:
                    rank.answer(message)

            rank.hear = hear

        fakes.on_start = refuse
        with pytest.raises(NotEnoughMemory, match="Rank 1 on elsewhere: It needs more") as caught:
            over_fakes.start(EngineConfig())
        assert caught.value.fix == "Give more."


def test_versions_that_differ_are_named(executor, config, monkeypatch):
    joined = executor.joined

    def older(join, stream):
        if join.address.rank == 1:
            join = Join(join.address, join.pid, "elsewhere", join.versions | {"torch": "1.0"})
        return joined(join, stream)

    monkeypatch.setattr(executor, "joined", older)
    with pytest.raises(ConfigError, match=r"torch is .* and 1\.0 on elsewhere"):
        executor.start(config)


def test_progress_is_that_of_all_ranks(executor, config):
    seen: list[tuple[str, float]] = []
    executor.start(config, lambda phase, share, _: seen.append((phase, share)))
    assert list(dict.fromkeys(phase for phase, _ in seen)) == ["weights", "kv cache", "warm-up"]
    assert seen == sorted(seen, key=lambda entry: (["weights", "kv cache", "warm-up"].index(entry[0]), entry[1]))
    assert [entry for entry in seen if entry[1] >= 1.0] == [("weights", 1.0), ("kv cache", 1.0), ("warm-up", 1.0)]


def test_ranks_load_at_the_same_time(config, tmp_path):
    """While one stands still before its first weight, the other one comes to its last."""
    now = tmp_path / "now"
    now.touch()
    with (
        env.changed(PHALANX_FAULT=f"at=load,rank=0,do=stop,file={now}"),
        contextlib.closing(multiprocess.SupervisorProcess(zygote=True)) as own,
    ):
        executor = mp_executor(own, Mesh(tp=2))
        seen: list[tuple[float, str]] = []

        def look(phase: str, share: float, behind: str) -> None:
            seen.append((share, behind))
            if seen[-1] == (0.5, "rank 0 0%, rank 1 100%"):
                os.kill(pids(executor)[0], signal.SIGCONT)

        executor.start(config, look)
        executor.close()
    assert (0.5, "rank 0 0%, rank 1 100%") in seen
    assert not now.exists()


class TestCores:
    def test_each_rank_has_its_own(self):
        assert core_plan([0, 1], 2) == [((0,), 1), ((1,), 1)]
        assert core_plan([0, 1, 2, 3, 4], 2) == [((0, 1), 2), ((2, 3, 4), 3)]
        assert core_plan([4, 6], 1) == [((4, 6), 2)]

    def test_more_ranks_than_cores_are_not_pinned(self):
        assert core_plan([0, 1], 3) == [((), 1)] * 3

    def test_what_is_one_physical_core_stays_together(self, tmp_path, monkeypatch):
        for core in range(4):
            folder = tmp_path / f"cpu{core}/topology"
            folder.mkdir(parents=True)
            (folder / "physical_package_id").write_text("0\n")
            (folder / "core_id").write_text(f"{core % 2}\n")
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
        monkeypatch.setattr(multiprocess, "usable_cores", lambda: 4)
        assert place_ranks(2, tmp_path) == [((0, 2), 2), ((1, 3), 2)]

    def test_a_quota_pins_nobody(self, tmp_path, monkeypatch):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
        monkeypatch.setattr(multiprocess, "usable_cores", lambda: 4)
        assert place_ranks(2, tmp_path) == [((), 2)] * 2
