"""The engine process's loop on a real Engine and the fake executor, driven over a socket from the test's thread."""

import errno
import socket
import statistics
import threading
import time
from itertools import pairwise

import msgspec
import pytest

from phalanx.config import RecoveryConfig
from phalanx.engine import core as core_module
from phalanx.engine import core_messages
from phalanx.engine.client import EngineOutput
from phalanx.engine.core import Core, Heartbeat
from phalanx.engine.core_messages import (
    Abort,
    Beat,
    Fatal,
    FrameSocket,
    FromEngine,
    Outputs,
    Shutdown,
    Submit,
    body_length,
    decode_from_engine,
    frame,
    loading_error,
    submit,
)
from phalanx.errors import UserError
from tests.helpers.engine_driver import VOCAB, Driver, make_request
from tests.helpers.fake_executor import oracle

PATIENCE = 10.0


class Running:
    """A `Core` on a thread of its own. With `gated`, each step waits in the executor until `let(steps)` lets it go."""

    def __init__(self, *, gated: bool = False, **options):
        self.driver = Driver(**options)
        self.begun = 0
        self.failures = 0
        self._gate = threading.Semaphore(0) if gated else None
        self._submit = self.driver.executor.submit
        self.driver.executor.submit = self._wait_and_submit
        self._ours, theirs = socket.socketpair()
        self._ours.settimeout(PATIENCE)
        self.core = Core(FrameSocket(theirs), self.driver.engine)
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.core.run()
        except Exception as error:
            self.error = error

    def _wait_and_submit(self, plan):
        self.begun += 1
        if self._gate is not None:
            assert self._gate.acquire(timeout=PATIENCE)
        if self.failures:
            self.failures -= 1
            raise ValueError("a bug")
        return self._submit(plan)

    def let(self, steps: int) -> None:
        self._gate.release(steps)

    def wait_for_step(self, number: int) -> None:
        deadline = time.monotonic() + PATIENCE
        while self.begun < number:
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def send(self, *messages) -> None:
        self._ours.sendall(b"".join(map(frame, messages)))

    def receive(self) -> FromEngine:
        return decode_from_engine(self._exactly(body_length(self._exactly(4))))

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            part = self._ours.recv(count - len(data))
            if not part:
                raise EOFError
            data += part
        return data

    def outputs_until(self, *finished: str) -> dict[str, list[EngineOutput]]:
        """Everything by request, up to the end of these requests."""
        found: dict[str, list[EngineOutput]] = {}
        while not all(any(o.finish_reason for o in found.get(rid, ())) for rid in finished):
            message = self.receive()
            assert isinstance(message, Outputs)
            for output in message.outputs:
                found.setdefault(output.request_id, []).append(output)
        return found

    def outputs_and_beats_until(self, finished: str) -> None:
        while True:
            message = self.receive()
            if isinstance(message, Outputs) and any(
                output.request_id == finished and output.finish_reason for output in message.outputs
            ):
                return

    def end(self) -> None:
        self.send(Shutdown())
        self.has_ended()

    def has_ended(self) -> None:
        """By itself and in order."""
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        assert self.error is None
        self._ours.close()

    def hang_up(self) -> None:
        self._ours.close()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()


def tokens(outputs: list[EngineOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def test_answers_and_acknowledges():
    running = Running()
    requests = [make_request(f"r{i}", [i, i + 1, i + 2]) for i in range(5)]
    running.send(*map(submit, requests))
    found = running.outputs_until(*(request.request_id for request in requests))
    for request in requests:
        outputs = found[request.request_id]
        assert (outputs[0].token_ids, outputs[0].finish_reason) == ([], None)
        assert tokens(outputs) == oracle(request, VOCAB)[0]
    running.end()


def test_an_acknowledgement_does_not_wait_for_a_step():
    running = Running(gated=True)
    running.send(submit(make_request("a", [1, 2])))
    assert running.receive().outputs == [EngineOutput("a", 0)]
    running.wait_for_step(1)
    running.send(submit(make_request("b", [3, 4])))
    running.let(100)
    running.outputs_until("a", "b")
    running.end()


def test_an_abort_frees_the_blocks_within_one_step():
    running = Running(gated=True)
    running.send(submit(make_request("a", [1, 2, 3], max_tokens=40)))
    running.let(3)
    running.wait_for_step(4)
    running.send(Abort(["a"]))  # while step 4 runs
    running.let(1)
    while True:
        message = running.receive()
        if message.status is not None and message.status.free_blocks == message.status.blocks:
            break
    assert running.begun == 4
    assert message.status.running == 0
    running.end()


def test_a_poisoned_request_fails_alone():
    running = Running()
    good = make_request("good", [1, 2, 3], max_tokens=20)
    whole = msgspec.msgpack.decode(msgspec.msgpack.encode(good))
    changes = ({"prompt_token_ids": []}, {"prompt_token_ids": None}, {"prompt_token_ids": [1] * 1000}, {"sampling": 5})
    bad = [Submit(f"bad{i}", msgspec.Raw(msgspec.msgpack.encode(whole | change))) for i, change in enumerate(changes)]
    running.send(submit(good), *bad, Submit("empty", msgspec.Raw(b"\xc0")), submit(good))
    found = running.outputs_until("good", "bad0", "bad1", "bad2", "bad3", "empty")
    assert all(found[f"bad{i}"][-1].error is not None for i in range(4))
    errors = [output for output in found["good"] if output.error is not None]
    assert [output.error.status for output in errors] == [400]  # the second one: its id is in use
    answers = [output for output in found["good"] if output.error is None]
    while not any(output.finish_reason for output in answers):
        answers += [output for output in running.receive().outputs]
    assert tokens(answers) == oracle(good, VOCAB)[0]
    running.end()


def test_a_step_that_fails_unexpectedly_changes_no_token():
    running = Running(gated=True)
    request = make_request("a", [1, 2, 3])
    running.send(submit(request))
    running.let(2)
    running.wait_for_step(3)
    running.failures = 1
    running.let(100)
    assert tokens(running.outputs_until("a")["a"]) == oracle(request, VOCAB)[0]
    running.end()


def test_steps_that_keep_failing_end_the_engine_with_the_cause():
    running = Running()
    running.failures = 10**6
    running.send(submit(make_request("a", [1, 2, 3])))
    while not isinstance(message := running.receive(), Fatal):
        pass
    assert "ValueError: a bug" in message.cause
    running.has_ended()


def test_lost_workers_that_do_not_come_back_end_the_engine():
    running = Running()
    running.driver.executor.lose_result = True
    running.driver.executor.restart = lambda epoch: (_ for _ in ()).throw(core_module.WorkerDied(0, "gone for good"))
    running.send(submit(make_request("a", [1, 2, 3])))
    while not isinstance(message := running.receive(), Fatal):
        pass
    assert "gone for good" in message.cause
    running.has_ended()


def test_outputs_too_large_for_one_frame_go_in_several_and_end_only_whom_they_must(monkeypatch):
    running = Running(gated=True, blocks=128, max_model_len=200, max_num_batched_tokens=200)
    running.send(submit(make_request("a", list(range(64)) * 2, max_tokens=4, prompt_logprobs=0)))
    running.send(*(submit(make_request(f"b{i}", [1, 2, 3], max_tokens=4)) for i in range(6)))
    monkeypatch.setattr(core_messages, "MAX_FRAME", 1000)
    running.let(1000)
    found = running.outputs_until("a", *(f"b{i}" for i in range(6)))
    refused = next(output for output in found["a"] if output.finish_reason is not None)
    assert refused.error.status == 400
    assert "too many" in refused.error.message
    for i in range(6):
        assert found[f"b{i}"][-1].finish_reason == "length"
        assert sum(len(output.token_ids) for output in found[f"b{i}"]) == 4
    running.end()


def usual(times: list[float]) -> float:
    """Seconds from one to the next: the median, since a busy machine may hold one up."""
    return statistics.median(later - earlier for earlier, later in pairwise(times))


def test_an_idle_engine_beats():
    running = Running()
    times, beats = [time.monotonic()], []
    for _ in range(5):
        beats.append(running.receive())
        times.append(time.monotonic())
    assert usual(times) < 0.5
    assert all(isinstance(beat, Outputs) and beat.status.state == "ready" for beat in beats)
    assert beats[-1].status.heartbeat >= beats[0].status.heartbeat
    running.end()


def test_status_comes_when_the_work_is_done():
    running = Running()
    running.send(submit(make_request("a", [1, 2, 3])))
    running.outputs_until("a")
    message = running.receive()
    assert message.status.running == 0
    running.end()


def test_the_end_of_the_front_end_ends_the_loop():
    running = Running()
    running.hang_up()
    assert isinstance(running.error, EOFError)


def test_the_end_of_the_front_end_ends_the_loop_in_mid_work():
    running = Running(gated=True)
    running.send(submit(make_request("a", [1, 2, 3], max_tokens=40)))
    running.wait_for_step(1)
    running.let(1)
    running.let(1000)
    running.hang_up()
    assert isinstance(running.error, (EOFError, OSError))


def test_requests_come_and_go_while_workers_start_again():
    running = Running()
    opened = threading.Event()
    restart = running.driver.executor.restart
    running.driver.executor.restart = lambda epoch: (opened.wait(PATIENCE), restart(epoch))[1]
    running.driver.executor.lose_result = True
    first, second = make_request("a", [1, 2, 3]), make_request("b", [4, 5])
    running.send(submit(first))
    while running.driver.engine.status().state != "recovering":
        time.sleep(0.001)
    begin = time.monotonic()
    running.send(submit(second), Submit("bad", msgspec.Raw(b"\xc0")), submit(make_request("c", [1])), Abort(["c"]))
    found = running.outputs_until("bad", "c")
    assert set(map(msgspec.msgpack.encode, found["b"])) == {msgspec.msgpack.encode(EngineOutput("b", 0))}
    assert found["c"][-1].finish_reason == "abort"
    assert time.monotonic() - begin < 2.0
    opened.set()
    rest = running.outputs_until("a", "b")
    assert tokens(found.get("a", []) + rest["a"]) == oracle(first, VOCAB)[0]
    assert tokens(found["b"] + rest["b"]) == oracle(second, VOCAB)[0]
    running.end()


def test_the_end_is_obeyed_while_workers_start_again():
    running = Running()
    opened = threading.Event()
    running.driver.executor.restart = lambda epoch: opened.wait(PATIENCE)
    running.driver.executor.lose_result = True
    running.send(submit(make_request("a", [1, 2, 3])))
    while running.driver.engine.status().state != "recovering":
        time.sleep(0.001)
    begin = time.monotonic()
    running.end()
    assert time.monotonic() - begin < 2.0
    opened.set()


def test_a_loss_with_recovery_off_ends_the_engine():
    running = Running(recovery=RecoveryConfig(enable_recovery=False))
    running.driver.executor.lose_result = True
    running.send(submit(make_request("a", [1, 2, 3])))
    messages = []
    while not messages or not isinstance(messages[-1], Fatal):
        messages.append(running.receive())
    outputs = [output for message in messages[:-1] for output in message.outputs]
    assert outputs[-1].error.status == 503
    assert "lost in a step" in messages[-1].cause
    running.has_ended()


def beats_of(running: Running, count: int) -> list[Beat]:
    beats = []
    while len(beats) < count:
        message = running.receive()
        if isinstance(message, Beat):
            beats.append(message)
    return beats


def test_the_heart_beats_within_a_long_step():
    running = Running(gated=True)
    running.send(submit(make_request("a", [1, 2, 3])))
    running.wait_for_step(1)
    with Heartbeat(running.core._channel, running.driver.engine):
        beats, times = [], []
        for _ in range(6):
            beats += beats_of(running, 1)
            times.append(time.monotonic())
        assert usual(times) < 0.5
        assert len({(beat.turns, beat.progress) for beat in beats}) == 1  # neither moves: such an engine may be hung
        running.let(1)
        running.wait_for_step(2)
        assert beats_of(running, 2)[-1].turns > beats[-1].turns
        running.let(1000)
        running.outputs_and_beats_until("a")
    running.end()


def test_a_change_of_state_is_heard_at_once(monkeypatch):
    monkeypatch.setattr(core_module, "BEAT_S", 10 * PATIENCE)  # no other beat comes
    running = Running(gated=True)
    heard = threading.Event()
    running.driver.executor.restart = lambda epoch: (heard.wait(PATIENCE), running.driver.layout)[1]
    running.send(submit(make_request("a", [1, 2, 3], max_tokens=40)))
    running.wait_for_step(1)
    with Heartbeat(running.core._channel, running.driver.engine):
        beats_of(running, 1)
        running.driver.executor.lose_submit = True
        running.let(1)
        while beats_of(running, 1)[0].status.state != "recovering":
            pass
        running.driver.executor._begin(1)
        heard.set()
        running.let(1000)
        running.outputs_and_beats_until("a")
    running.end()


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:1] . DefaultCPUAllocator: can't allocate memory: you tried"),
    ],
)
def test_too_little_memory_is_not_an_internal_error(error):
    failure = loading_error(core_module._start_failure(error))
    assert type(failure) is UserError and "not enough memory" in failure.message and failure.fix


def test_a_loading_engine_beats():
    ours, theirs = socket.socketpair()
    ours.settimeout(PATIENCE)
    with Heartbeat(FrameSocket(theirs)) as heartbeat:
        heartbeat.progress += 1
        beat = decode_from_engine(ours.recv(body_length(ours.recv(4))))
    assert isinstance(beat, Beat)
    assert (beat.status.state, beat.turns) == ("loading", 0)
    ours.close()
    theirs.close()


def test_the_fault_point_after_sending_comes_when_all_is_sent(monkeypatch):
    running = Running(gated=True)
    sent: list[object] = []
    send = running.core._channel.send
    running.core._channel.send = lambda message: (sent.append(message), send(message))[1]
    monkeypatch.setattr(core_module.fault_point, "reach", lambda at, **where: sent.append((at, where.get("step"))))
    running.send(submit(make_request("a", [1, 2, 3], max_tokens=2)))
    running.let(1000)
    running.outputs_until("a")
    running.end()
    told = [
        "tokens" if isinstance(entry, Outputs) else entry[0]
        for entry in sent
        if isinstance(entry, tuple) or (isinstance(entry, Outputs) and any(o.token_ids for o in entry.outputs))
    ]
    assert told == ["before_commit", "after_commit", "tokens", "after_send"] * 2
