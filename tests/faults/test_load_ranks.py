"""A start that fails says in seconds which rank, where, and why, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx import env
from phalanx.distributed.mesh import Mesh
from phalanx.errors import CheckpointError, NotEnoughMemory, PhalanxError
from phalanx.executor import hub
from phalanx.executor.base import WorkerDied
from phalanx.executor.death import MemoryKills, describe
from phalanx.executor.multiprocess import SupervisorProcess
from tests.helpers.plans import Run, admission, answer, plan
from tests.helpers.processes import descendants, wait_until
from tests.helpers.rank_processes import launcher, left_behind, mp_executor, pids
from tests.helpers.worker_model import engine_config, write_model

ROOT = Path(__file__).resolve().parents[2]
NODE = platform.node()


@pytest.fixture(scope="module")
def config(rank_model):
    return engine_config(rank_model)


@contextlib.contextmanager
def fails_cleanly(supervisor, seconds: float) -> Iterator[None]:
    """What is tried fails within so many seconds, and then nothing is left of it."""
    supervisor.start()
    before, names, began = descendants(), left_behind(), time.monotonic()
    yield
    assert time.monotonic() - began < seconds
    assert descendants() <= before
    assert left_behind() <= names


class TestKilledWhileStarting:
    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
    def test_before_it_joins(self, supervisor, config, number):
        executor = mp_executor(supervisor, Mesh(tp=3))
        killed = []

        def kill(rank: int, pid: int) -> None:
            if rank == 2:
                killed.append(time.monotonic())
                os.kill(pid, number)

        launcher(executor).on_start = kill
        words = rf"Worker 2 on {NODE} died: it was killed by {number.name} before it could (join|meet)"
        with fails_cleanly(supervisor, 20), pytest.raises(WorkerDied, match=words):
            executor.start(config)
        assert time.monotonic() - killed[0] < 1

    @pytest.mark.parametrize(("point", "doing"), [("load", "load the model"), ("allocate", "allocate its cache")])
    def test_at_a_certain_point(self, config, point, doing):
        with (
            env.changed(PHALANX_FAULT=f"at={point},rank=1,do=kill"),
            contextlib.closing(SupervisorProcess(zygote=True)) as own,
        ):
            own.start()
            words = f"Worker 1 on {NODE} died: it was killed by SIGKILL before it could {doing}"
            with fails_cleanly(own, 20), pytest.raises(WorkerDied, match=words):
                mp_executor(own, Mesh(pp=2)).start(config)

    @pytest.mark.parametrize("phase", ["weights", "kv cache", "warm-up"])
    def test_in_each_phase(self, supervisor, config, phase):
        """With so small a model, the signal may come when that phase is over, or all are; then the first step tells."""
        executor = mp_executor(supervisor, Mesh(pp=2))
        killed = []

        def progress(name: str, *_) -> None:
            if name == phase and not killed:
                killed.append(time.monotonic())
                os.kill(pids(executor)[1], signal.SIGKILL)

        words = f"Worker 1 on {NODE} died: it was killed by SIGKILL"
        doing = "(load the model|measure its memory|allocate its cache)"
        try:
            with fails_cleanly(supervisor, 5), pytest.raises(WorkerDied, match=f"{words} before it could {doing}"):
                executor.start(config, progress)
        except pytest.fail.Exception:
            with pytest.raises(WorkerDied, match=words):
                executor.submit(plan([Run(0, 1)], admit=[admission(0, [1], [0])])).result()
        assert time.monotonic() - killed[0] < 1.5
        executor.close()

    def test_the_supervisor(self, config, tmp_path):
        held = tmp_path / "held"
        held.touch()
        with (
            env.changed(PHALANX_FAULT=f"at=allocate,do=sleep=60,while={held}"),
            contextlib.closing(SupervisorProcess(zygote=True)) as own,
        ):
            executor = mp_executor(own, Mesh(tp=2))
            with pytest.raises(WorkerDied, match="it ended with its supervisor: it was killed by SIGKILL"):
                executor.start(config, lambda *_: own._process.kill())
            held.unlink()
            executor.start(config)  # under a new one
            assert answer(executor.submit(plan([Run(0, 1)], admit=[admission(0, [1], [0])])).result()).tokens
            executor.close()


class TestCannotStart:
    def test_one_that_never_joins(self, config, monkeypatch, tmp_path):
        now = tmp_path / "now"
        with (
            env.changed(PHALANX_FAULT=f"at=join,rank=1,do=stop,file={now}"),
            contextlib.closing(SupervisorProcess(zygote=True)) as own,
        ):
            own.start()
            first = mp_executor(own, Mesh(tp=2))
            first.start(config)  # now the supervisor has imported what ranks need
            first.close()
            now.touch()
            monkeypatch.setattr(hub, "join_bound", lambda floor: 2.0)
            words = rf"Worker 1 on {NODE} died: it did not join within 2 s \(waiting for 1\)"
            with fails_cleanly(own, 7), pytest.raises(WorkerDied, match=words):
                mp_executor(own, Mesh(tp=2)).start(config)

    def test_the_model_is_gone(self, supervisor, tmp_path):
        folder = write_model(tmp_path / "model")
        config = engine_config(folder)
        (folder / "model.safetensors").unlink()
        executor = mp_executor(supervisor, Mesh(tp=2))
        with (
            fails_cleanly(supervisor, 5),
            pytest.raises(CheckpointError, match=rf"Rank \d on {NODE}: .*model") as caught,
        ):
            executor.start(config)
        assert caught.value.fix

    def test_a_damaged_file(self, supervisor, tmp_path):
        folder = write_model(tmp_path / "model")
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-100])
        executor = mp_executor(supervisor, Mesh(pp=2))
        with fails_cleanly(supervisor, 5), pytest.raises(CheckpointError, match=rf"Rank \d on {NODE}: .*safetensors"):
            executor.start(engine_config(folder))

    def test_too_little_memory(self, supervisor, rank_model):
        executor = mp_executor(supervisor, Mesh(tp=2))
        with fails_cleanly(supervisor, 5), pytest.raises(NotEnoughMemory, match=rf"Rank \d on {NODE}: .*max-model-len"):
            executor.start(engine_config(rank_model, kv_cache_memory_bytes=1000))

    def test_what_nobody_expected_is_told_by_its_name(self, supervisor, config, monkeypatch):
        """A rank that fails before it can speak leaves its last words with the supervisor."""
        executor = mp_executor(supervisor, Mesh(tp=2))
        watch_of = executor._listen

        def elsewhere():
            watch = watch_of()
            watch.address = type(watch.address)(-1, watch.address.node, "phalanx-nobody-listens-here")
            return watch

        monkeypatch.setattr(executor, "_listen", elsewhere)
        words = "it ended with status 1 .Rank . cannot reach the engine on this node: Connection refused"
        with fails_cleanly(supervisor, 5), pytest.raises(WorkerDied, match=words):
            executor.start(config)


def groups_of_memory() -> Path | None:
    """Where a control group with a memory limit can be made."""
    for folder in (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")):
        kind = "memory.limit_in_bytes" if folder.name == "memory" else "cgroup.controllers"
        text = (folder / kind).read_text() if (folder / kind).is_file() else ""
        if (folder.name == "memory" or "memory" in text.split()) and os.access(folder, os.W_OK):
            return folder
    return None


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group without a limit yet."""
    parent = groups_of_memory()
    if parent is None:
        pytest.skip("no control group for memory can be made here")
    folder = parent / f"phalanx-test-{os.getpid()}"
    folder.mkdir()
    yield folder
    assert wait_until(lambda: not (folder / "cgroup.procs").read_text(), 5)
    folder.rmdir()


def test_out_of_memory_is_told_apart_with_the_limit(supervisor, tmp_path, group):
    """Rank 1 begins in a control group whose limit falls below what it is about to use."""
    folder = write_model(tmp_path / "model")
    facts = json.loads((folder / "config.json").read_text())
    large = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8}
    (folder / "config.json").write_text(json.dumps(facts | large))
    executor = mp_executor(supervisor, Mesh(tp=2))
    stays: list[int] = []

    def release(rank: int, pid: int) -> None:
        """Ranks begin in their supervisor's group; all others leave it."""
        leaves = pid if rank == 0 else supervisor._process.pid
        (group.parent / "cgroup.procs").write_text(str(leaves))
        if rank == 1:
            stays.append(pid)

    def progress(*_) -> None:
        """It has found that there is enough. It stands still for a moment, or it would use more than it may then."""
        if stays:
            old = ("memory.limit_in_bytes", "memory.usage_in_bytes")
            limit, used = ("memory.max", "memory.current") if (group / "memory.max").exists() else old
            victim = stays.pop()
            os.kill(victim, signal.SIGSTOP)
            (group / limit).write_text(str(max(64 << 20, int((group / used).read_text()) + (4 << 20))))
            os.kill(victim, signal.SIGCONT)

    launcher(executor).on_start = release
    words = rf"Worker 1 on {NODE} died: it was killed by SIGKILL \(out of memory.*\) before it could load the model"
    with fails_cleanly(supervisor, 20):
        (group / "cgroup.procs").write_text(str(supervisor._process.pid))
        with pytest.raises(WorkerDied, match=words):
            executor.start(engine_config(folder, load_format="dummy", kv_cache_memory_bytes="16M"), progress)


class TestWords:
    @pytest.mark.parametrize(
        ("status", "why", "words"),
        [
            (signal.SIGKILL, None, "it was killed by SIGKILL"),
            (signal.SIGKILL, "out of memory", "it was killed by SIGKILL (out of memory)"),
            (signal.SIGSEGV | 0x80, "out of memory", "it was killed by SIGSEGV"),
            (0x300, None, "it ended with status 3"),
            (0x100, "no such file", "it ended with status 1 (no such file)"),
        ],
    )
    def test_of_a_death(self, status, why, words):
        assert describe(int(status), why) == words

    @pytest.mark.parametrize("version", [1, 2])
    def test_of_memory(self, tmp_path, version):
        """Counts and limits in the files of both versions of control groups."""
        folder = tmp_path / "sys/fs/cgroup" / ("memory/a" if version == 1 else "a")
        counts = folder / ("memory.oom_control" if version == 1 else "memory.events")
        folder.mkdir(parents=True)
        (folder / ("memory.limit_in_bytes" if version == 1 else "memory.max")).write_text(f"{64 << 20}\n")
        (tmp_path / "proc/7").mkdir(parents=True)
        group = tmp_path / "proc/7/cgroup"
        group.write_text("4:memory:/a\n" if version == 1 else "0::/a\n")
        (tmp_path / "proc/vmstat").write_text("oom_kill 5\n")
        counts.write_text("low 0\noom_kill 2\n")
        kills = MemoryKills(tmp_path)
        kills.look([7])
        group.write_text("4:memory:/\n" if version == 1 else "0::/\n")  # where one that is ending may be shown
        kills.look([7])
        counts.write_text("low 0\noom_kill 3\n")
        assert "its control group may use 64.0 MiB" in kills.blame(7)

    def test_of_memory_elsewhere(self, tmp_path):
        """Its own group counts, and has not lost anybody."""
        (tmp_path / "sys/fs/cgroup/memory/a").mkdir(parents=True)
        (tmp_path / "sys/fs/cgroup/memory/a/memory.oom_control").write_text("oom_kill 0\n")
        (tmp_path / "proc/7").mkdir(parents=True)
        (tmp_path / "proc/7/cgroup").write_text("4:memory:/a\n")
        (tmp_path / "proc/vmstat").write_text("oom_kill 5\n")
        kills = MemoryKills(tmp_path)
        kills.look([7])
        (tmp_path / "proc/vmstat").write_text("oom_kill 6\n")
        assert kills.blame(7) is None

    def test_of_memory_that_its_group_was_short_of_before_it_was_there(self, tmp_path):
        """The group has lost processes, none of them since it was looked at first."""
        folder = tmp_path / "sys/fs/cgroup/memory/a"
        folder.mkdir(parents=True)
        (folder / "memory.oom_control").write_text("oom_kill 4\n")
        (tmp_path / "proc/7").mkdir(parents=True)
        (tmp_path / "proc/7/cgroup").write_text("4:memory:/a\n")
        kills = MemoryKills(tmp_path)
        kills.look([7])
        assert kills.blame(7) is None
        kills.look([7])
        (folder / "memory.oom_control").write_text("oom_kill 5\n")
        assert kills.blame(7) is not None

    def test_of_memory_before_anybody_looked(self, tmp_path):
        """It began in our group, which counts: the machine's count says nothing about it."""
        (tmp_path / "sys/fs/cgroup/memory/ours").mkdir(parents=True)
        counts = tmp_path / "sys/fs/cgroup/memory/ours/memory.oom_control"
        counts.write_text("oom_kill 4\n")
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/cgroup").write_text("4:memory:/ours\n")
        (tmp_path / "proc/vmstat").write_text("oom_kill 5\n")
        kills = MemoryKills(tmp_path)
        (tmp_path / "proc/vmstat").write_text("oom_kill 6\n")
        assert kills.blame(7) is None
        counts.write_text("oom_kill 5\n")
        assert kills.blame(7) is not None

    def test_of_memory_that_was_short_long_ago(self, tmp_path):
        (tmp_path / "proc").mkdir()
        (tmp_path / "proc/vmstat").write_text("oom_kill 5\n")
        now = 0.0
        kills = MemoryKills(tmp_path, clock=lambda: now)
        assert kills.blame(7) is None
        (tmp_path / "proc/vmstat").write_text("oom_kill 6\n")
        assert kills.blame(7) == "out of memory, it seems: at that time the kernel ended a process for want of it"
        for now in range(30):
            kills.look([7])
            assert (kills.blame(7) is not None) == (now < 10), now
        assert len(kills._samples) < 15

    def test_of_memory_of_a_process_that_takes_its_time_to_end(self, tmp_path):
        """It is large, or the machine is busy: it is looked at again and again meanwhile, and another one starts, which
        ends for another reason."""
        counts = tmp_path / "sys/fs/cgroup/memory/a/memory.oom_control"
        counts.parent.mkdir(parents=True)
        counts.write_text("oom_kill 4\n")
        for process in (7, 8):
            (tmp_path / f"proc/{process}").mkdir(parents=True)
            (tmp_path / f"proc/{process}/cgroup").write_text("4:memory:/a\n")
        kills = MemoryKills(tmp_path)
        for _ in range(3):
            kills.look([7])
        counts.write_text("oom_kill 5\n")
        for _ in range(3):
            kills.look([7, 8])
        assert kills.blame(7) is not None and kills.blame(8) is None

    def test_of_memory_as_often_as_the_kernel_counted(self, tmp_path):
        """Whoever is killed otherwise at that time is not counted in, nor is one that started in between left out."""
        counts = tmp_path / "sys/fs/cgroup/memory/a/memory.oom_control"
        counts.parent.mkdir(parents=True)
        counts.write_text("oom_kill 4\n")
        for process in range(6):
            (tmp_path / f"proc/{process}").mkdir(parents=True)
            (tmp_path / f"proc/{process}/cgroup").write_text("4:memory:/a\n")
        kills = MemoryKills(tmp_path)
        kills.look([0, 1, 2])
        counts.write_text("oom_kill 5\n")
        kills.look([0, 1, 2])
        assert kills.blame(0) is not None
        kills.look([1, 2])
        assert kills.blame(1) is None
        kills.look([2, 3])
        counts.write_text("oom_kill 7\n")
        assert [kills.blame(process) is not None for process in (2, 3)] == [True, True]
        kills.look([4])
        counts.write_text("oom_kill 8\n")
        kills.look([4, 5])
        counts.write_text("oom_kill 9\n")
        assert [kills.blame(process) is not None for process in (4, 5)] == [True, True]


SCRIPT = """
import sys
from phalanx import LLM, SamplingParams
with LLM(sys.argv[1], tensor_parallel_size=2, dtype="float32", kv_cache_memory_bytes="1M") as llm:
    print(llm.generate("hello", SamplingParams(max_tokens=8, temperature=0.0))[0].outputs[0].token_ids)
"""


@pytest.mark.parametrize("mount", ["size=8M", "size=8M,ro"])
def test_a_small_or_read_only_dev_shm_does_not_matter(tiny_model, mount):
    shell = f"mount -t tmpfs -o {mount} tmpfs /dev/shm && exec {sys.executable} -c '{SCRIPT}' {tiny_model}"
    command = ["unshare", "-m", "sh", "-c", shell]
    if os.getuid() != 0 or subprocess.run(["unshare", "-m", "true"]).returncode:
        pytest.skip("mounting needs root")
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("[")
    assert not done.stderr


def test_layouts_that_the_model_cannot_have_are_refused_before_anything_starts(tiny_model):
    from phalanx import LLM

    for options, words in (
        ({"tensor_parallel_size": 6}, "6 tensor ranks cannot share 5 attention heads"),
        ({"pipeline_parallel_size": 3}, "3 pipeline stages cannot share 2 layers"),
        ({"context_parallel_size": 2}, "context parallelism is not in this version"),
        ({"data_parallel_size": 2, "distributed_executor_backend": "ray"}, "no Ray cluster runs here for the replicas"),
    ):
        before, began = descendants(), time.monotonic()
        with pytest.raises(PhalanxError, match=words):
            LLM(tiny_model, **options)
        assert descendants() <= before
        assert time.monotonic() - began < 3
