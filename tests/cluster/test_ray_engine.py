"""`RayDistributedEngine` on a real local Ray: the published examples as they stand, order, load, deaths of leaders in
mid-answer, users' own workers, mistakes, and what is left."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

import pytest

from phalanx import LLM, RayConfig, RayDistributedEngine, Request, Response, SamplingConfig
from phalanx.cluster import RayWorker, setup_ray_resources
from phalanx.errors import ConfigError, InvalidRequest, PhalanxError
from phalanx.executor.ray_view import RayView
from tests.helpers.pace import Pace, pace_of
from tests.helpers.processes import descendants, wait_until

pytestmark = pytest.mark.usefixtures("alone")

SMALL: dict[str, Any] = {"dtype": "float32", "kv_cache_memory_bytes": "1M", "max_num_seqs": 8}
PROMPTS = ["Hello, how are you?", "What is the capital of France?", "", "the world", "a b c"]


class CustomRayWorker(RayWorker):
    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self.custom_param = kwargs.get("custom_param", 0)

    def custom_method(self, x: int) -> int:
        return x * self.custom_param

    def generate(self, requests: list[Request]) -> list[Response]:
        responses = super().generate(requests)
        for r in responses:
            r.metadata["custom_param"] = self.custom_param
            r.metadata["pid"] = os.getpid()
        return responses


class Grumbler(RayWorker):
    def generate(self, requests: list[Request]) -> list[Response]:
        if requests[0].metadata.get("mood") == "silent":
            return []
        raise LookupError(f"no answer to {len(requests)} requests")


class Stillborn(RayWorker):
    def __init__(self, **kwargs: Any):
        raise OSError("no such spring")


@pytest.fixture(scope="module")
def ray(alone) -> Iterator[Any]:
    resources = setup_ray_resources(RayConfig(num_cpus=4, use_placement_groups=False, address="local"))
    yield resources.ray
    resources.close()


@pytest.fixture
def clean(ray) -> Iterator[Any]:
    """Ray; no actor, no group and no process of a test is left."""
    before = {pid for pid in descendants() if "phalanx-rank" in _title(pid) or "engine.core" in _title(pid)}
    yield ray
    view = RayView(ray)
    assert wait_until(lambda: not view.living_actors(), 10), view.living_actors()
    groups = lambda: [g for g in ray.util.placement_group_table().values() if g["state"] != "REMOVED"]  # noqa: E731
    assert wait_until(lambda: not groups(), 10), groups()
    assert wait_until(
        lambda: not {p for p in descendants() - before if re.search("phalanx-rank|engine.core", _title(p))}, 10
    )


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


@pytest.fixture(scope="module")
def want(model: str) -> Iterator[Any]:
    """Answers of the same model in this process: texts of prompts, greedy or with a seed."""
    with LLM(model, **SMALL) as llm:

        def answers(prompts: list[str], sampling: SamplingConfig) -> list[tuple[str, list[int], str | None]]:
            outputs = [output.outputs[0] for output in llm.generate(prompts, sampling, use_tqdm=False)]
            return [(output.text, output.token_ids, output.finish_reason) for output in outputs]

        yield answers


def as_answers(responses: list[Response]) -> list[tuple[str, list[int], str | None]]:
    return [(r.text, r.token_ids, r.finish_reason) for r in responses]


GREEDY = SamplingConfig(temperature=0.0, max_tokens=20)


@pytest.fixture(scope="class")
def pace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pace]:
    with pace_of(tmp_path_factory.mktemp("pace")) as pace:
        yield pace


@pytest.fixture(scope="class")
def engine(ray, model, pace) -> Iterator[RayDistributedEngine]:
    with RayDistributedEngine(
        model_name=model, data_parallel_size=2, worker_cls=CustomRayWorker, custom_param=7, **SMALL
    ) as engine:
        yield engine


class TestAnswers:
    """Two leaders, with a user's own class."""

    def test_answers_are_right_in_order_and_spread_over_leaders(self, engine, want) -> None:
        prompts = [p for p in PROMPTS * 3 if p]
        responses = engine.generate([Request(p, metadata={"n": i}) for i, p in enumerate(prompts)], GREEDY)
        assert as_answers(responses) == want(prompts, GREEDY)
        assert [r.metadata["n"] for r in responses] == list(range(len(prompts)))
        assert {r.metadata["custom_param"] for r in responses} == {7}
        assert len({r.metadata["pid"] for r in responses}) == 2
        assert responses[0].usage["completion_tokens"] == len(responses[0].token_ids)
        actor, index = engine.pool.get_actor()
        import ray

        assert ray.get(actor.custom_method.remote(6)) == 42
        engine.pool.release_actor(index)

    def test_own_sampling_token_ids_texts_and_streams(self, engine, want) -> None:
        three = SamplingConfig(temperature=0.0, max_tokens=3)
        responses = engine.generate(
            [Request([5, 6, 7]), Request("the world", sampling=three, request_id="mine")], GREEDY
        )
        assert responses[1].request_id == "mine" and len(responses[1].token_ids) == 3
        assert as_answers([engine.generate("the world", three)[0]]) == want(["the world"], three)
        seeded = SamplingConfig(seed=11, max_tokens=24, stop=("zq",))
        deltas = list(engine.generate_stream(["the world", "a b c"], seeded))
        by_id: dict[str, list[Response]] = {}
        for delta in deltas:
            by_id.setdefault(delta.request_id, []).append(delta)
        joined = [
            ("".join(d.text for d in ds), [t for d in ds for t in d.token_ids], ds[-1].finish_reason)
            for _, ds in sorted(by_id.items())
        ]
        assert joined == want(["the world", "a b c"], seeded)
        assert len(deltas) > 4 and all(ds[-1].usage["completion_tokens"] <= 24 for ds in by_id.values())
        stream = engine.generate_stream("the world", SamplingConfig(max_tokens=200, ignore_eos=True))
        next(stream)
        stream.close()
        assert wait_until(lambda: all(s["answer"]["running"] == 0 for s in engine.get_stats()), 10)

    def test_mistakes_of_one_call(self, engine) -> None:
        with pytest.raises(InvalidRequest, match=r"Request bad: .*4096|Request bad: .*context|Request bad: .*tokens"):
            engine.generate([Request("fine"), Request([5] * 1000, request_id="bad")], GREEDY)
        with pytest.raises(InvalidRequest, match="one answer without log-probabilities"):
            engine.generate("x", SamplingConfig(n=2))
        with pytest.raises(InvalidRequest, match="Two requests have the same"):
            engine.generate([Request("a", request_id="1"), Request("b", request_id="1")], GREEDY)
        with pytest.raises(InvalidRequest, match="Requests must be Request objects or texts"):
            engine.generate([3], GREEDY)
        with pytest.raises(InvalidRequest, match="`sampling` must be SamplingConfig, got dict"):
            engine.generate("x", {"max_tokens": 3})
        assert engine.generate([], GREEDY) == []

    def test_dispatch_goes_by_load(self, engine, pace) -> None:
        """By requests under way: taking turns, or counting calls, would send them elsewhere."""
        sampling = SamplingConfig(max_tokens=240, ignore_eos=True)
        assert wait_until(lambda: set(work(engine).values()) == {0}, 10), work(engine)
        _, held = engine.pool.get_actor(work=2.5)
        (free,) = set(work(engine)) - {held}
        with pace.slow(), contextlib.ExitStack() as stack:
            stack.callback(engine.pool.release_actor, held, work=2.5)
            for prompts, at_held in ((["the world", "a b c", "Hello"], 2.5), (["the world"], 3.5)):
                stream = stack.enter_context(contextlib.closing(engine.generate_stream(prompts, sampling)))
                next(stream)
                assert wait_until(lambda want=at_held: work(engine) == {held: want, free: 3}, 10), work(engine)
            running = lambda: {s["index"]: s.get("answer", {}).get("running") for s in engine.get_stats()}  # noqa: E731
            assert wait_until(lambda: running() == {held: 1, free: 3}, 5), running()  # calls of a leader side by side
        assert wait_until(lambda: set(work(engine).values()) == {0}, 10), work(engine)

    def test_a_leader_that_is_killed_in_mid_answer(self, engine, want, pace) -> None:
        """Batches and streams go on in the other one, with the same draws, and nothing is told twice."""
        sampling = SamplingConfig(seed=3, max_tokens=200, ignore_eos=True)
        expected = want(["the world"], sampling)
        pids = {each["answer"]["pid"] for each in engine.get_stats()}
        with pace.slow():
            stream = engine.generate_stream("the world", sampling)
            told = [next(stream) for _ in range(5)]
            os.kill(one_busy(engine), signal.SIGKILL)
        told += list(stream)
        got = ("".join(d.text for d in told), [t for d in told for t in d.token_ids], told[-1].finish_reason)
        assert [got] == expected
        assert told[-1].usage["completion_tokens"] == 200
        assert wait_until(lambda: list(engine.pool.health_check().values()) == ["ready"] * 2, 60), (
            engine.pool.describe()
        )
        assert {each["answer"]["pid"] for each in engine.get_stats()} != pids

        # both leaders lose their batch once, one after the other
        result: list[Response] = []
        prompts, killed = ["the world", "a b c", "Hello"] * 3, set[int]()
        thread = threading.Thread(target=lambda: result.extend(engine.generate(prompts, sampling)))
        with pace.slow():
            thread.start()
            for _ in range(2):
                victim = one_busy(engine, killed)
                os.kill(victim, signal.SIGKILL)
                killed.add(victim)
        thread.join(90)
        assert as_answers(result) == want(prompts, sampling)
        assert {r.metadata["custom_param"] for r in result} == {7}


def work(engine: RayDistributedEngine) -> dict[int, float]:
    """Handed out and not released, by leader."""
    return {each["index"]: each["work"] for each in engine.pool.describe()}


def one_busy(engine: RayDistributedEngine, but: Container[int] = ()) -> int:
    """The process of a leader that computes, once there is one."""
    found: list[int] = []

    def look() -> bool:
        answers = [each.get("answer", {}) for each in engine.get_stats(1)]
        found[:] = [a["pid"] for a in answers if a.get("running") and a["pid"] not in but]
        return bool(found)

    assert wait_until(look, 60), engine.pool.describe()
    return found[0]


def refused(call, kind: type[Exception], *said: str) -> None:
    began = time.monotonic()
    with pytest.raises(kind) as caught:
        call()
    text = str(caught.value)
    assert time.monotonic() - began < 30 and "\n" not in text and "Traceback" not in text
    for each in said:
        assert each in text, text


class TestMistakes:
    def test_before_anything_is_started(self, clean, model) -> None:
        engine = RayDistributedEngine
        refused(lambda: engine(model, tensor_paralel_size=2), ConfigError, "Unknown option 'tensor_paralel_size'")
        refused(lambda: engine(model, enable_lora=True), ConfigError, "enable_lora is not in this version")
        refused(lambda: engine(model, tensor_parallel_size=0), ConfigError, "`tensor_parallel_size` is 0")
        refused(lambda: engine(model, worker_cls=dict), ConfigError, "no subclass of RayWorker")
        refused(lambda: engine(model, max_model_len="long"), ConfigError, "'long' is not a size")
        refused(lambda: engine(model, actor_options={"cpu": 1}), ConfigError, "options for RayWorker are no good")

    @pytest.mark.slow
    def test_a_constructor_that_raises(self, clean, model) -> None:
        refused(
            lambda: RayDistributedEngine(model, worker_cls=Stillborn),
            ConfigError,
            "the constructor of Stillborn on ",
            "OSError: no such spring",
        )

    @pytest.mark.slow
    def test_a_model_that_the_node_does_not_have(self, clean) -> None:
        refused(lambda: RayDistributedEngine("/no/such/model"), ConfigError, "/no/such/model", "RayWorker on ")

    @pytest.mark.slow
    def test_more_than_there_is(self, clean, model) -> None:
        refused(
            lambda: RayDistributedEngine(model, tensor_parallel_size=2, num_gpus_per_worker=1, **SMALL),
            ConfigError,
            "no place for 2 ranks",
            "GPU 0 of 0 free",
        )

    @pytest.mark.slow
    def test_a_generate_that_raises_or_returns_something_else(self, clean, model) -> None:
        with RayDistributedEngine(model, worker_cls=clean.remote(num_cpus=1)(Grumbler), **SMALL) as engine:
            assert clean.available_resources()["CPU"] == 2, "the decoration's CPU and the rank's"
            refused(
                lambda: engine.generate(["a", "b"], GREEDY),
                PhalanxError,
                "Grumbler.generate on ",
                "raised LookupError: no answer to 2 requests",
            )
            silent = Request("a", metadata={"mood": "silent"})
            refused(lambda: engine.generate(silent, GREEDY), PhalanxError, "must return a list of 1 responses", "0 of")


def test_without_ray(model, want) -> None:
    with RayDistributedEngine(model, use_ray=False, worker_cls=CustomRayWorker, custom_param=3, **SMALL) as engine:
        responses = engine.generate(["the world", "a b c"], GREEDY)
        assert as_answers(responses) == want(["the world", "a b c"], GREEDY)
        assert {(r.metadata["custom_param"], r.metadata["pid"]) for r in responses} == {(3, os.getpid())}
        assert "".join(d.text for d in engine.generate_stream("a b c", GREEDY)) == responses[1].text
        with pytest.raises(ConfigError, match="without Ray"):
            engine.pool  # noqa: B018


IMPORTS = """
from phalanx import RayConfig, RayDistributedEngine, SamplingConfig, Request
from phalanx.cluster import setup_ray_resources, RayWorker, monitor_cluster_health
"""
FIRST = """
setup_ray_resources(RayConfig(address="auto", num_cpus=2, num_gpus=0, use_placement_groups=True,
                              placement_strategy="SPREAD", gpus_per_node=0, cpus_per_node=1, memory_per_node=1))
engine = RayDistributedEngine(model_name="...", tensor_parallel_size=2, pipeline_parallel_size=1,
                              context_parallel_size=1, use_ray=True)
responses = engine.generate([Request(prompt="Hello, how are you?"), Request(prompt="What is the capital of France?")],
                            SamplingConfig(max_tokens=50))
"""
SECOND = """
class CustomRayWorker(RayWorker):                       # users subclass the leader actor of a replica
    def __init__(self, **kwargs):
        super().__init__(**kwargs); self.custom_param = kwargs.get("custom_param", 0)
    def custom_method(self, x: int) -> int: return x * self.custom_param
    def generate(self, requests):
        responses = super().generate(requests)
        for r in responses: r.metadata["custom_param"] = self.custom_param
        return responses
engine = RayDistributedEngine(model_name="...", worker_cls=CustomRayWorker, custom_param=7)
"""


def test_the_published_examples_as_they_stand(alone, model, tmp_path) -> None:
    """As one program on 2 CPUs: only the model's name is filled in, and something is looked at. The first engine lives
    until the second one is there, and nothing closes them; the end of the program does."""
    look = "print([r.usage['completion_tokens'] > 0 for r in responses], engine.generate(['Hello'])[0].metadata)"
    said = "[True, True] {'custom_param': 7}"
    script = tmp_path / "example.py"
    script.write_text(f"{IMPORTS}{FIRST}{SECOND}{look}\n".replace('"..."', repr(model)))
    environment = {**os.environ, "RAY_TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == said, done.stdout
    assert done.stderr == ""

    def left() -> list[str]:
        found = []
        for process in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if process.name.isdigit() and str(tmp_path).encode() in (process / "environ").read_bytes():
                    found.append(_title(int(process.name)))
        return found

    assert wait_until(lambda: not left(), 10), left()
