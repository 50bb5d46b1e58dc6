"""An engine over ranks that are processes: the same tokens as over one rank, whatever the layout, also when ranks are
killed in mid-stream."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter

import psutil
import pytest

from phalanx.distributed.mesh import Mesh
from phalanx.distributed.transports.segment import LINE
from phalanx.engine import recovery
from phalanx.executor.base import WorkerDied
from phalanx.executor.hub import HubExecutor
from phalanx.executor.launcher import Layout
from phalanx.executor.multiprocess import SupervisorLauncher
from phalanx.kernels.library import native
from phalanx.worker.limits import host_memory
from tests.helpers.plans import Run, admission, answer, plan
from tests.helpers.processes import alive, gone_within, wait_until
from tests.helpers.rank_processes import launcher, mp_executor, pids, requests, serve, start_engine, undisturbed
from tests.helpers.tiny_gguf import in_blocks
from tests.helpers.tiny_model import write_tiny_model
from tests.helpers.worker_model import engine_config

LAYOUTS = {
    "tp2": (Mesh(tp=2), {}),
    "tp3": (Mesh(tp=3), {}),
    "tp4, more ranks than KV heads": (Mesh(tp=4), {}),
    "tp2, 3 to 1": (Mesh(tp=2), {"tensor_weights": ((3.0, 1.0),)}),
    "pp2": (Mesh(pp=2), {"stage_layers": (1, 2)}),
    "pp3": (Mesh(pp=3), {}),
    "tp2 pp2": (Mesh(tp=2, pp=2), {"stage_layers": (2, 1)}),
    "2 and 1": (Mesh.of_widths((2, 1)), {}),
    "1 and 3": (Mesh.of_widths((1, 3)), {}),
}
TYPES = {
    "bfloat16": {"dtype": "bfloat16"},
    "blocks": {"dtype": "bfloat16", "quantization": "gguf"},
    "int8 cache": {"dtype": "bfloat16", "quantization": "gguf", "kv_cache_dtype": "int8"},
}
WANTED = requests(7)


@pytest.fixture(scope="module")
def config(rank_model):
    return engine_config(rank_model)


@pytest.fixture(scope="module")
def expected(config):
    return undisturbed(config, WANTED)


@pytest.fixture
def engine_of(supervisor, config):
    """Makes an engine over ranks; it is closed at the end."""
    engines = []

    def make(mesh: Mesh, **layout):
        executor = mp_executor(supervisor, mesh, **layout)
        engines.append(start_engine(executor, config))
        return engines[-1], executor

    yield make
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_gives_the_tokens_of_one_rank(engine_of, expected, name):
    mesh, layout = LAYOUTS[name]
    engine, executor = engine_of(mesh, **layout)
    served = serve(engine, WANTED)
    assert not served.errors
    assert served.tokens == expected
    assert len(set(pids(executor))) == mesh.world_size


@pytest.mark.recovery
def test_ranks_that_cannot_be_forked_are_spawned(config, expected):
    """As for GPUs, whose drivers do not survive a fork."""
    executor = HubExecutor(SupervisorLauncher(2, "a device of that kind"), Layout(Mesh(tp=2)))
    engine = start_engine(executor, config)
    try:
        before = pids(executor)
        words = [" ".join(psutil.Process(pid).cmdline()) for pid in before]
        assert all("supervisor --rank" in line for line in words)
        served = serve(engine, WANTED, lambda steps, _: os.kill(before[1], signal.SIGKILL) if steps == 9 else None)
        assert (served.tokens, served.errors) == (expected, {})
    finally:
        engine.close()
    assert not any(map(alive, before))


class TestPipeline:
    def test_has_as_many_plans_in_flight_as_stages_with_the_requests_spread_over_them(self, engine_of, monkeypatch):
        engine, executor = engine_of(Mesh(pp=3))
        sizes: list[list[int]] = []
        submit = executor.submit

        def note(submitted):
            sizes.append([len(submitted.rows.slots) // 2, len(executor._flight._pending) + 1])
            return submit(submitted)

        monkeypatch.setattr(executor, "submit", note)
        serve(engine, requests(8, tokens=30))
        steady = sizes[12:-12]
        assert Counter(in_flight for _, in_flight in steady).most_common(1)[0][0] == 3
        assert {rows for rows, _ in steady} <= {2, 3}  # of 8

    @pytest.mark.recovery
    @pytest.mark.parametrize("rank", [0, 1])
    def test_a_loss_among_several_pieces_of_one_prompt(self, supervisor, rank_model, rank):
        wanted = requests(3, tokens=12, prompt=40)
        executor = mp_executor(supervisor, Mesh(pp=2))
        engine = start_engine(executor, engine_config(rank_model, max_num_batched_tokens=8))
        before = pids(executor)

        def kill(steps: int, tokens: int) -> None:
            if steps == 3:
                assert engine._scheduler.running[0].num_computed == 24
                assert engine._scheduler.running[0].in_flight == 8
                os.kill(before[rank], signal.SIGKILL)

        try:
            served = serve(engine, wanted, kill)
            assert (served.tokens, served.errors) == (undisturbed(engine_config(rank_model), wanted), {})
            assert engine.status().epoch == 1
        finally:
            engine.close()

    def test_a_stage_goes_on_with_the_next_plan_while_the_following_one_is_busy(self, supervisor, config):
        executor = mp_executor(supervisor, Mesh(pp=2))
        executor.start(config)
        try:
            os.kill(pids(executor)[1], signal.SIGSTOP)
            try:
                admit = [admission(0, list(range(9)), [0, 1, 2])]
                first = executor.submit(plan([Run(0, 9)], admit=admit, step=1))
                second = executor.submit(plan([Run(1, 3)], admit=[admission(1, [5, 6, 7], [8])], step=2))
                taken = executor._flight._traffic._plans._segment.words
                assert wait_until(lambda: taken[LINE] == 2, 5)  # by the first stage
                assert taken[2 * LINE] < 2
            finally:
                os.kill(pids(executor)[1], signal.SIGCONT)
            assert [first.result().step_id, second.result().step_id] == [1, 2]
        finally:
            executor.close()


class TestKilled:
    """Every request of the running ones ends with the tokens it would have had."""

    @pytest.mark.recovery
    @pytest.mark.parametrize("rank", [0, 1, 2])
    def test_in_mid_stream(self, engine_of, expected, rank):
        engine, executor = engine_of(Mesh.of_widths((2, 1)))
        before = pids(executor)

        def kill(steps: int, tokens: int) -> None:
            if steps == 12:
                os.kill(before[rank], signal.SIGKILL)

        served = serve(engine, WANTED, kill)
        assert not served.errors
        assert served.tokens == expected
        after = pids(executor)
        assert [a == b for a, b in zip(before, after, strict=True)] == [r != rank for r in range(3)]
        assert engine.status().epoch == 1 and engine.status().state == "ready"
        assert launcher(executor).started == [0, 1, 2, rank]

    @pytest.mark.recovery
    @pytest.mark.parametrize("kind", TYPES)
    def test_in_every_type(self, supervisor, kind, tmp_path):
        """As the same ranks answer undisturbed: with one rank, sums have another order."""
        if native() is None:
            pytest.skip("PyTorch's products depend on what else is computed")
        model, options = write_tiny_model(tmp_path / "model"), TYPES[kind]
        if options.get("quantization") == "gguf":
            model = in_blocks(model, tmp_path / "blocks")
        executor = mp_executor(supervisor, Mesh(tp=2))
        engine = start_engine(executor, engine_config(model, **options))
        try:
            wanted = serve(engine, WANTED)
            before = pids(executor)
            killed = serve(engine, WANTED, lambda steps, _: os.kill(before[1], signal.SIGKILL) if steps == 12 else None)
            assert engine.status().epoch == 1
        finally:
            engine.close()
        assert (killed.tokens, killed.errors) == (wanted.tokens, {})

    @pytest.mark.recovery
    def test_again_and_again(self, engine_of, expected):
        engine, executor = engine_of(Mesh(tp=2))
        kills = 0

        def kill(steps: int, tokens: int) -> None:
            nonlocal kills
            if tokens >= (kills + 1) * 30 and kills < 5:
                os.kill(pids(executor)[kills % 2], signal.SIGKILL)
                kills += 1

        served = serve(engine, WANTED, kill)
        assert (served.tokens, served.errors, kills) == (expected, {}, 5)
        assert engine.status().epoch == 5

    @pytest.mark.recovery
    def test_all_at_once_or_with_their_supervisor(self, engine_of, expected, supervisor):
        engine, executor = engine_of(Mesh(tp=2))

        def kill(steps: int, tokens: int) -> None:
            if steps == 10:
                for pid in pids(executor):
                    os.kill(pid, signal.SIGKILL)
            if steps == 20:
                supervisor._process.kill()

        served = serve(engine, WANTED, kill)
        assert (served.tokens, served.errors) == (expected, {})

    @pytest.mark.recovery
    def test_during_the_restart(self, engine_of, expected):
        engine, executor = engine_of(Mesh(tp=2))
        killed = []

        def kill_the_new_one(rank: int, pid: int) -> None:
            if len(killed) < 2:
                killed.append(pid)
                os.kill(pid, signal.SIGKILL)

        def kill(steps: int, tokens: int) -> None:
            if steps == 8:
                launcher(executor).on_start = kill_the_new_one
                os.kill(pids(executor)[1], signal.SIGKILL)

        served = serve(engine, WANTED, kill)
        assert (served.tokens, served.errors) == (expected, {})
        assert engine.status().epoch == 3

    def test_too_often_is_an_error_for_every_request(self, engine_of, monkeypatch):
        monkeypatch.setattr(recovery, "BACK_OFF_S", (0.0, 0.05))
        engine, executor = engine_of(Mesh(tp=2))
        launcher(executor).on_start = lambda rank, pid: os.kill(pid, signal.SIGKILL)

        def kill(steps: int, tokens: int) -> None:
            if steps == 5:
                os.kill(pids(executor)[0], signal.SIGKILL)

        served = serve_until_dead(engine, kill)
        assert len(served) == len(WANTED)
        assert all("SIGKILL" in message and "Worker 0" in message for message in served.values())


def serve_until_dead(engine, kill) -> dict[str, str]:
    errors, steps = {}, 0
    for request in WANTED:
        engine.add(request)
    while len(errors) < len(WANTED):
        for output in engine.step():
            if output.error is not None:
                errors[output.request_id] = output.error.message
        steps += 1
        kill(steps, 0)
    return errors


class TestNotice:
    """A death is noticed within half a second, whatever the ranks do, with the signal's name."""

    @pytest.fixture
    def executor(self, supervisor, config):
        executor = mp_executor(supervisor, Mesh(tp=2))
        executor.start(config)
        yield executor
        executor.close()

    @pytest.mark.parametrize("rank", [0, 1])
    def test_idle(self, executor, rank):
        os.kill(pids(executor)[rank], signal.SIGKILL)
        assert wait_until(lambda: executor.check_health()[rank].state == "dead", 0.5)
        with pytest.raises(WorkerDied, match=rf"Worker {rank} on \S+ died: it was killed by SIGKILL\.") as caught:
            executor.submit(plan([Run(0, 1)], admit=[admission(0, [1], [0])])).result()
        assert caught.value.rank == rank

    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
    def test_while_a_result_is_awaited(self, executor, number):
        os.kill(pids(executor)[0], signal.SIGSTOP)  # so that rank 1 waits for it, and we for both
        future = executor.submit(plan([Run(0, 1)], admit=[admission(0, [1], [0])]))
        killed = []

        def kill() -> None:
            killed.append(time.monotonic())
            os.kill(pids(executor)[1], number)

        timer = threading.Timer(0.3, kill)
        timer.start()
        with pytest.raises(WorkerDied, match=f"Worker 1 .* killed by {number.name}"):
            future.result()
        assert time.monotonic() - killed[0] < 0.5
        timer.join()

    def test_a_stopped_rank_is_replaced_and_commits_nothing(self, executor):
        """It has a step to do when it is stopped; what it would say when it wakes up is of an epoch that is over."""
        stopped = pids(executor)[1]
        prompt = [3, 4, 5]
        want = answer(executor.submit(plan([Run(0, 3)], admit=[admission(0, prompt, [0])])).result()).tokens
        os.kill(stopped, signal.SIGSTOP)
        late = executor.submit(plan([Run(1, 3)], admit=[admission(1, prompt, [1])], step=77))
        began = time.monotonic()
        executor.restart(1)
        assert time.monotonic() - began < 8
        assert not alive(stopped)
        assert late.cancelled()
        assert pids(executor)[1] != stopped
        again = executor.submit(plan([Run(0, 3)], admit=[admission(0, prompt, [0])], epoch=1, step=78)).result()
        assert (again.epoch, again.step_id, answer(again).tokens) == (1, 78, want)
        free = [status.memory["free"] for status in executor.check_health()]
        assert max(free) < 1.5 * min(free) and sum(free) < 1.5 * host_memory().available, "parts of one machine"


def test_survivors_keep_their_weights(supervisor, config, rank_model, tmp_path):
    """With the files gone, an epoch begins all the same."""
    moved = tmp_path / "model"
    moved.mkdir()
    for file in rank_model.iterdir():
        (moved / file.name).write_bytes(file.read_bytes())
    executor = mp_executor(supervisor, Mesh(tp=2))
    executor.start(engine_config(moved))
    try:
        admit = [admission(0, [3, 4, 5], [0])]
        want = answer(executor.submit(plan([Run(0, 3)], admit=admit)).result())
        for file in moved.iterdir():
            file.unlink()
        before = pids(executor)
        executor.restart(1)
        assert pids(executor) == before
        assert answer(executor.submit(plan([Run(0, 3)], admit=admit, epoch=1)).result()) == want
        os.kill(before[0], signal.SIGKILL)
        with pytest.raises(Exception, match=r"Rank 0 on .*model"):
            executor.restart(2)
    finally:
        executor.close()
    assert all(gone_within(pid, 5) for pid in before)


def test_idle_ranks_burn_no_core(supervisor, config):
    executor = mp_executor(supervisor, Mesh.of_widths((2, 1)))
    executor.start(config)
    try:
        answer(executor.submit(plan([Run(0, 1)], admit=[admission(0, [1], [0])])).result())
        time.sleep(0.1)
        watched = [psutil.Process(pid) for pid in (os.getpid(), *pids(executor))]
        before = [sum(process.cpu_times()[:2]) for process in watched]
        time.sleep(2.0)
        used = [sum(process.cpu_times()[:2]) - b for process, b in zip(watched, before, strict=True)]
        assert max(used) <= 0.06, used
    finally:
        executor.close()


def test_the_supervisor_has_one_thread_and_ranks_have_cores_of_their_own(supervisor, config):
    executor = mp_executor(supervisor, Mesh(tp=2))
    executor.start(config)
    try:
        assert psutil.Process(supervisor._process.pid).num_threads() == 1
        cores = [set(psutil.Process(pid).cpu_affinity()) for pid in pids(executor)]
        if len(os.sched_getaffinity(0)) >= 2:
            assert not cores[0] & cores[1]
        else:
            assert cores[0] == cores[1] == os.sched_getaffinity(0)
    finally:
        executor.close()
