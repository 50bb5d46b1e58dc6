import fcntl
import resource
import socket
import struct

import msgspec
import pytest

from phalanx import errors
from phalanx.config import EngineConfig
from phalanx.engine import core_messages as messages
from phalanx.engine.client import EngineOutput, EngineStatus, request_error
from phalanx.sampling_params import SamplingParams, StructuredOutputs
from tests.helpers.engine_requests import engine_request


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, messages.FrameSocket(theirs)


def test_requests_survive_the_wire():
    request = engine_request(
        logit_bias={3: -1.5}, stop=("x",), structured_outputs=StructuredOutputs(json={"type": "object"}), temperature=1
    )
    assert messages.decode_request(messages.submit(request).request) == request


def test_configuration_survives_the_wire(pair):
    ours, channel = pair
    config = EngineConfig.from_options(model="m", served_model_name=("a", "b"), gpu_memory_utilization=0.5, port=1)
    ours.sendall(messages.frame(messages.Start(config, "m")))
    (message,) = channel.receive(1)
    assert message == messages.Start(config, "m")


def test_frames_cut_anywhere_arrive_whole_and_in_order(pair):
    ours, channel = pair
    sent = [messages.submit(engine_request(f"r{i}")) for i in range(3)] + [messages.Abort(["r1"]), messages.Shutdown()]
    data = b"".join(map(messages.frame, sent))
    received = []
    for start in range(0, len(data), 7):
        ours.sendall(data[start : start + 7])
        received += channel.receive(1)
    assert [type(m) for m in received] == [type(m) for m in sent]
    assert [m.request_id for m in received[:3]] == ["r0", "r1", "r2"]


def test_a_burst_that_the_socket_cannot_hold_is_read_whole(pair, monkeypatch):
    """500 clients come and go in one step of the engine: it hears of both before the next."""
    ours, channel = pair
    requests = [messages.submit(engine_request(f"r{i}", prompt=list(range(300)))) for i in range(500)]
    left = memoryview(b"".join(map(messages.frame, [*requests, messages.Abort([r.request_id for r in requests])])))
    ours.setblocking(False)

    def send_more(event, timeout=None):  # as a front end does that finds room again
        nonlocal left
        while left:
            try:
                left = left[ours.send(left[: 1 << 12]) :]
            except BlockingIOError:
                break

    monkeypatch.setattr(channel, "_await", send_more)
    send_more(0)
    assert left
    received = channel.receive(0)
    assert not left and len(received) == 501 and isinstance(received[-1], messages.Abort)


def test_receive_does_not_wait_when_told_so(pair):
    assert pair[1].receive(0) == []


def test_the_end_of_the_peer_is_noticed(pair):
    ours, channel = pair
    ours.close()
    with pytest.raises(EOFError):
        channel.receive(1)


@pytest.mark.parametrize(
    "data",
    [
        struct.pack(">I", messages.MAX_FRAME + 1),
        struct.pack(">I", 3) + b"abc",
        struct.pack(">I", 1) + b"\xc1",
        messages.frame(messages.Progress("x", 0.0, "")),  # of the other direction
        struct.pack(">I", 0),
    ],
)
def test_nonsense_is_refused(pair, data):
    ours, channel = pair
    ours.sendall(data)
    with pytest.raises(messages.BrokenFrame):
        channel.receive(1)


def test_pickles_are_nonsense(pair):
    ours, channel = pair
    canary = b"cos\nsystem\n(S'touch /tmp/phalanx-canary'\ntR."
    ours.sendall(struct.pack(">I", len(canary)) + canary)
    with pytest.raises(messages.BrokenFrame):
        channel.receive(1)


@pytest.mark.parametrize("body", [b"", b"abc", msgspec.msgpack.encode({"type": "outputs", "outputs": 5})])
def test_nonsense_from_the_engine_is_refused(body):
    with pytest.raises(messages.BrokenFrame):
        messages.decode_from_engine(body)


def test_outputs_survive_the_wire():
    outputs = messages.Outputs(
        [EngineOutput("r", 0, [1, 2], finish_reason="stop")], EngineStatus(state="ready", step=4)
    )
    assert messages.decode_from_engine(messages.frame(outputs)[4:]) == outputs


def test_a_frame_above_the_limit_is_not_made(monkeypatch):
    monkeypatch.setattr(messages, "MAX_FRAME", 100)
    with pytest.raises(messages.BrokenFrame, match="limit"):
        messages.frame(messages.Abort(["x" * 200]))


KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.PhalanxError)]


@pytest.mark.parametrize("kind", KINDS)
def test_load_errors_keep_their_class_message_and_fix(kind):
    error = kind("What happened.", fix="What to do.", param="p")
    again = messages.loading_error(messages.load_failure(error))
    assert (type(again), again.message, again.fix, again.param) == (kind, "What happened.", "What to do.", "p")
    assert again.body() == error.body()


def test_subclasses_from_elsewhere_arrive_as_the_nearest_kind():
    class Special(errors.FormatError):
        pass

    assert type(messages.loading_error(messages.load_failure(Special("x")))) is errors.FormatError


@pytest.mark.parametrize("kind", KINDS)
def test_request_errors_keep_what_a_client_sees(kind):
    error = kind("What happened.", fix="What to do.", param="p")
    again = messages.raised(request_error(error))
    assert again.body() == error.body()
    assert (again.status, again.retry_after) == (error.status, error.retry_after)


@pytest.mark.parametrize(
    "kind", [errors.InvalidRequest, errors.ContextLengthExceeded, errors.QueueFull, errors.EngineDead]
)
def test_request_errors_that_callers_tell_apart_keep_their_class(kind):
    assert type(messages.raised(request_error(kind("x")))) is kind


@pytest.mark.parametrize("timeout", [0.0, 0.01])
def test_a_socket_may_have_any_number(pair, timeout):
    """It has the number that it had in a front end with perhaps thousands of open files."""
    ours, channel = pair
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] < 2000:
        pytest.skip("this machine allows too few open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (2000, limits[1]))
    try:
        with socket.socket(fileno=fcntl.fcntl(ours.fileno(), fcntl.F_DUPFD, 1500)) as far:
            assert far.fileno() >= 1500
            channel = messages.FrameSocket(far)
            channel.receive(timeout)
            channel.send(messages.Outputs([]))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_message_that_is_too_large_is_not_sent_in_part(pair, monkeypatch):
    ours, channel = pair
    monkeypatch.setattr(messages, "MAX_FRAME", 100)
    with pytest.raises(messages.BrokenFrame):
        channel.send(messages.Fatal("x" * 101))
    ours.setblocking(False)
    with pytest.raises(BlockingIOError):
        ours.recv(1)


def test_unexpected_errors_tell_no_details():
    error = request_error(ValueError("secret prompt"))
    assert "secret" not in error.message
    assert error.status == 500


def test_a_request_that_does_not_fit_its_type_is_noticed():
    raw = msgspec.Raw(msgspec.msgpack.encode({"request_id": "r", "prompt_token_ids": "x", "sampling": {}}))
    with pytest.raises(msgspec.ValidationError):
        messages.decode_request(raw)
    bad = {"request_id": "r", "prompt_token_ids": [1], "sampling": {"temperature": 99.0}}
    with pytest.raises(errors.InvalidRequest):
        messages.decode_request(msgspec.Raw(msgspec.msgpack.encode(bad)))
    assert SamplingParams(temperature=1.0)
