"""LLM end to end on a tiny model, in this process."""

import gc
import json
import os
import signal
import sys
import threading
import time

import pytest

from phalanx import LLM, SamplingParams, StructuredOutputs
from phalanx.engine.client import EngineOutput
from phalanx.engine.output_processor import RequestAssembly
from phalanx.errors import CheckpointError, ConfigError, ContextLengthExceeded, EngineDead, InvalidRequest
from phalanx.outputs import RequestOutput
from tests.helpers.tiny_model import KV_BYTES_PER_TOKEN, write_tiny_model

PROMPTS = ["hello world", "the stop", "x", "héllo 🙂", "a longer prompt that fills more than one block of the cache"]
BLOCK = 16


def cramped(blocks: int) -> dict:
    """A cache of so many blocks."""
    return {"kv_cache_memory_bytes": blocks * BLOCK * KV_BYTES_PER_TOKEN, "block_size": BLOCK}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_tiny_model(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def llm(model):
    with LLM(model, dtype="float32", kv_cache_memory_bytes="8M") as llm:
        yield llm
        status = llm._engine.status()
        assert status.free_blocks == status.blocks
        assert status.running == status.waiting == 0


@pytest.fixture(scope="module")
def cramped_llm(model):
    """Room for one full context and a little more: a batch must preempt."""
    with LLM(model, dtype="float32", max_model_len=128, max_num_seqs=8, **cramped(11)) as llm:
        yield llm
        status = llm._engine.status()
        assert status.free_blocks == status.blocks


def params(**changes) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 40, "temperature": 0.0, "ignore_eos": True, **changes})


def answers(outputs) -> list[list[list[int]]]:
    return [[choice.token_ids for choice in output.outputs] for output in outputs]


def test_outputs_come_whole_and_in_order(llm):
    outputs = llm.generate(PROMPTS, params())
    assert [output.prompt for output in outputs] == PROMPTS
    for output in outputs:
        (choice,) = output.outputs
        assert output.finished
        assert output.prompt_token_ids == llm.tokenizer.encode(output.prompt)
        assert len(choice.token_ids) == 40
        assert choice.finish_reason == "length"
        assert choice.text == llm.tokenizer.decode(choice.token_ids)
    assert len({tuple(o.outputs[0].token_ids) for o in outputs}) == len(PROMPTS)


def test_all_ways_to_write_a_prompt(llm):
    ids = llm.tokenizer.encode("hello world")
    (expected,) = answers(llm.generate("hello world", params()))
    for prompt in (
        ["hello world"],
        {"prompt": "hello world"},
        {"prompt_token_ids": ids},
        [{"prompt_token_ids": ids}],
        ids,
    ):
        assert answers(llm.generate(prompt, params())) == [expected]
    mixed = llm.generate(["hello world", {"prompt_token_ids": ids, "cache_salt": "s", "priority": 1}, ids], params())
    assert answers(mixed) == [expected] * 3
    assert [output.prompt for output in mixed] == ["hello world", None, None]
    assert llm.generate([], params()) == []


@pytest.mark.parametrize("prompt", [5, {"text": "x"}, {"prompt": "x", "prompt_token_ids": [1]}, [None], {}, "", [""]])
def test_bad_prompts(llm, prompt):
    with pytest.raises(InvalidRequest):
        llm.generate(prompt, params())


def test_defaults_are_sixteen_tokens(llm):
    (output,) = llm.generate("hello")
    assert len(output.outputs[0].token_ids) <= 16
    assert llm.get_default_sampling_params() == SamplingParams(max_tokens=16)


def test_params_per_prompt(llm):
    outputs = llm.generate(PROMPTS[:3], [params(max_tokens=n) for n in (1, 5, 9)])
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 5, 9]
    with pytest.raises(InvalidRequest, match="3 prompts but 2"):
        llm.generate(PROMPTS[:3], [params()] * 2)
    with pytest.raises(InvalidRequest, match="must be SamplingParams, got type"):
        llm.generate(PROMPTS[:3], SamplingParams)


@pytest.mark.parametrize("drawn", [{}, {"temperature": 1.0, "seed": 11}, {"temperature": 1.3, "seed": 5, "top_p": 0.9}])
def test_same_request_same_tokens_alone_in_a_batch_and_after_preemption(llm, cramped_llm, drawn):
    wanted = params(max_tokens=60, **drawn)
    alone = [answers(llm.generate(prompt, wanted))[0] for prompt in PROMPTS]
    assert answers(llm.generate(PROMPTS, wanted)) == alone
    before = cramped_llm._engine.status().preemptions
    assert answers(cramped_llm.generate(PROMPTS, wanted)) == alone
    assert cramped_llm._engine.status().preemptions > before


def test_choices_have_draws_of_their_own_and_repeat_with_the_seed(llm, cramped_llm):
    wanted = params(n=3, temperature=1.0, seed=-3)
    (first,) = answers(llm.generate("hello", wanted))
    assert len({tuple(tokens) for tokens in first}) == 3
    for again in (llm, cramped_llm):
        outputs = again.generate(["the", "hello", "x"], wanted)
        assert answers(outputs)[1] == first
        assert [choice.index for choice in outputs[1].outputs] == [0, 1, 2]
    assert answers(llm.generate("hello", params(temperature=1.0, seed=-3)))[0] == first[:1]


def test_without_a_seed_draws_differ(llm):
    wanted = params(temperature=1.0)
    assert answers(llm.generate("hello", wanted)) != answers(llm.generate("hello", wanted))


def test_the_configured_seed_is_used(model):
    with LLM(model, dtype="float32", seed=4, kv_cache_memory_bytes="1M") as llm:
        wanted = params(temperature=1.0)
        assert answers(llm.generate("hello", wanted)) == answers(llm.generate("hello", params(temperature=1.0, seed=4)))


def test_stop_strings_are_found_across_tokens(llm):
    (free,) = llm.generate("hello world", params())
    text, ids = free.outputs[0].text, free.outputs[0].token_ids
    for begin, end in ((3, 5), (7, 10), (0, 2)):
        stop = text[begin:end]
        (output,) = llm.generate("hello world", params(stop=(stop,)))
        (choice,) = output.outputs
        assert choice.text == text[: text.index(stop)]
        assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
        assert choice.token_ids == ids[: len(choice.token_ids)]
        assert stop in llm.tokenizer.decode(choice.token_ids)
        assert stop not in llm.tokenizer.decode(choice.token_ids[:-1])


@pytest.mark.parametrize(("stop", "most"), [((), 8), (("nowhere",), 41)])
def test_text_is_made_of_several_tokens_at_once_unless_it_may_stop(llm, monkeypatch, stop, most):
    pushed, push = [], RequestAssembly.push

    def counted(assembly: RequestAssembly, output: EngineOutput) -> RequestOutput | None:
        pushed.append(output)
        return push(assembly, output)

    monkeypatch.setattr(RequestAssembly, "push", counted)
    (output,) = llm.generate("hello world", params(stop=stop))
    assert len(output.outputs[0].token_ids) == 40
    assert most - 2 <= len(pushed) <= most


def test_stop_token_ids(llm):
    (free,) = llm.generate("hello world", params())
    ids = free.outputs[0].token_ids
    (output,) = llm.generate("hello world", params(stop_token_ids=(ids[6],)))
    (choice,) = output.outputs
    assert choice.token_ids == ids[: ids.index(ids[6]) + 1]
    assert choice.stop_reason == ids[6]
    assert choice.text == llm.tokenizer.decode(choice.token_ids[:-1])


def test_logprobs(llm):
    (output,) = llm.generate("hello world", params(logprobs=3, max_tokens=10))
    (choice,) = output.outputs
    assert len(choice.logprobs) == 10
    assert choice.cumulative_logprob == pytest.approx(sum(p.chosen.logprob for p in choice.logprobs))
    for token, position in zip(choice.token_ids, choice.logprobs, strict=True):
        assert position.chosen.token_id == token == position.top[0].token_id
        assert position.chosen.rank == 1
        assert len(position.top) == 3
        values = [entry.logprob for entry in position.top]
        assert values == sorted(values, reverse=True)
        assert position.chosen.data == llm.tokenizer.token_bytes(token)


def test_constraints_that_leave_no_token_are_the_requests_fault(llm):
    with pytest.raises(InvalidRequest, match="leave no token"):
        llm.generate("hello", params(allowed_token_ids=(40,), bad_words=(llm.tokenizer.decode([40]),)))
    with pytest.raises(InvalidRequest, match="leave no token"):
        llm.generate("hello", params(repetition_penalty=1e-300))


def test_prompt_logprobs_are_the_same_cached_chunked_or_preempted(llm, cramped_llm, model):
    wanted = params(prompt_logprobs=2, max_tokens=2)
    ids = llm.tokenizer.encode(PROMPTS[-1])

    def numbers(output):
        assert output.prompt_logprobs[0] is None
        assert [p.chosen.token_id for p in output.prompt_logprobs[1:]] == ids[1:]
        return [p.chosen.logprob for p in output.prompt_logprobs[1:]]

    llm.generate(PROMPTS[-1], params())  # now its blocks are in the prefix cache
    expected = numbers(llm.generate(PROMPTS[-1], wanted)[0])
    assert numbers(cramped_llm.generate([PROMPTS[-1]] * 4, wanted)[3]) == pytest.approx(expected, abs=1e-4)
    with LLM(model, dtype="float32", max_num_batched_tokens=8, kv_cache_memory_bytes="1M") as chunked:
        assert numbers(chunked.generate(PROMPTS[-1], wanted)[0]) == pytest.approx(expected, abs=1e-4)


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "size": {"enum": ["small", "large"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["name", "size", "tags"],
    "additionalProperties": False,
}


def test_structured_outputs_with_choices_and_preemption(llm, cramped_llm):
    # JSON may have any amount of white space between its parts, and a random model would use it up.
    space = {llm.tokenizer.encode(char)[0]: -100.0 for char in " \n\r\t"}
    structure = StructuredOutputs(json=SCHEMA)
    wanted = SamplingParams(
        n=3, temperature=1.0, seed=2, max_tokens=110, structured_outputs=structure, logit_bias=space
    )
    prompts = ["hello", "the", "x", "hello world", "a", "the the"]
    outputs = llm.generate(prompts, wanted)
    for output in outputs:
        for choice in output.outputs:
            assert choice.finish_reason == "stop"
            value = json.loads(choice.text)
            assert set(value) == {"name", "size", "tags"}
            assert value["size"] in ("small", "large")
    before = cramped_llm._engine.status().preemptions
    for _ in range(2):  # the second time the grammar is there, so that all of them run at once
        assert answers(cramped_llm.generate(prompts, wanted)) == answers(outputs)
    assert cramped_llm._engine.status().preemptions > before


@pytest.mark.parametrize(
    ("wanted", "pattern"),
    [
        ({"regex": "[ab]{3}!"}, r"[ab]{3}!"),
        ({"choice": ("yes", "no")}, "yes|no"),
        ({"json_object": True}, r"(?s)\{.*\}?"),
    ],
)
def test_other_structures(llm, wanted, pattern):
    import re

    (output,) = llm.generate("x", params(structured_outputs=StructuredOutputs(**wanted), max_tokens=60))
    assert re.fullmatch(pattern, output.outputs[0].text)


def test_a_bad_schema_is_refused_before_anything_runs(llm):
    step = llm._engine.status().step
    with pytest.raises(InvalidRequest):
        llm.generate(["x", "y"], [params(), params(structured_outputs=StructuredOutputs(regex="(["))])
    assert llm._engine.status().step == step


def test_chat(llm):
    conversation = [{"role": "user", "content": "hello"}]
    (output,) = llm.chat(conversation, params())
    assert output.prompt == "<user>hello<bot>"
    assert llm.chat(conversation, params(), add_generation_prompt=False)[0].prompt == "<user>hello"
    both = llm.chat([conversation, [{"role": "system", "content": "x"}]], params())
    assert [o.prompt for o in both] == ["<user>hello<bot>", "<system>x<bot>"]
    assert answers(both)[0] == answers([output])[0]
    with pytest.raises(InvalidRequest):
        llm.chat([], params())


def test_more_prompts_than_the_queue_holds(model):
    with LLM(model, dtype="float32", kv_cache_memory_bytes="1M", max_num_queued_reqs=2, max_num_seqs=3) as llm:
        outputs = llm.generate([f"{i}" for i in range(30)], params(max_tokens=3))
        assert [output.prompt for output in outputs] == [f"{i}" for i in range(30)]


def test_a_request_above_the_cache_is_refused_and_leaves_the_engine_empty(model):
    with LLM(model, dtype="float32", max_model_len=128, **cramped(8)) as llm:
        with pytest.raises(ContextLengthExceeded):
            llm.generate(["x", "y" * 120], params(max_tokens=20))
        assert answers(llm.generate("x", params(max_tokens=3)))
        status = llm._engine.status()
        assert status.free_blocks == status.blocks


def test_interrupt_gives_up_the_call_and_nothing_else(llm):
    expected = answers(llm.generate(PROMPTS, params()))
    gc.collect()  # a signal that arrives inside the __del__ of another test's LLM would be swallowed there
    struck: list[float] = []

    def strike() -> None:
        struck.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(0.2, strike)
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        timer.start()
        llm.generate(PROMPTS * 400, params(max_tokens=180))
    assert time.monotonic() - struck[0] < 3
    timer.join()
    status = llm._engine.status()
    assert status.running == status.waiting == 0
    assert status.free_blocks == status.blocks
    assert answers(llm.generate(PROMPTS, params())) == expected
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_works_on_another_thread(llm):
    results = []
    thread = threading.Thread(target=lambda: results.append(llm.generate("hello", params())))
    thread.start()
    thread.join()
    assert answers(results[0]) == answers(llm.generate("hello", params()))


def test_threads_take_turns(llm):
    expected = answers(llm.generate(PROMPTS, params()))
    found: list[list[list[list[int]]]] = []

    def ask() -> None:
        for _ in range(3):
            found.append(answers(llm.generate(PROMPTS, params())))

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # so that they would be in each other's way
    threads = [threading.Thread(target=ask, daemon=True) for _ in range(4)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(before)
    assert found == [expected] * 12


def test_a_fork_leaves_the_ranks_to_its_parent(model):
    with LLM(model, dtype="float32", kv_cache_memory_bytes="8M", tensor_parallel_size=2) as llm:
        expected = answers(llm.generate("hello", params()))
        child = os.fork()
        if child == 0:
            code = 1
            try:
                with pytest.raises(EngineDead, match="fork"):
                    llm.generate("hello", params())
                llm.close()
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        assert answers(llm.generate("hello", params())) == expected
        assert llm._engine.status().epoch == 0


def test_a_fork_does_not_wait_for_a_thread_of_its_parent(model):
    with LLM(model, dtype="float32", kv_cache_memory_bytes="8M") as llm:
        expected = answers(llm.generate("hello", params()))
        llm._turn.acquire()  # as a thread has it that generates
        child = os.fork()
        if child:
            llm._turn.release()
        else:
            code = 1
            try:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(60)
                with pytest.raises(EngineDead, match="fork"):
                    llm.generate("hello", params())
                llm.close()
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        assert answers(llm.generate("hello", params())) == expected


def test_generation_config_gives_the_defaults(tmp_path):
    folder = str(write_tiny_model(tmp_path / "m", generation_config={"temperature": 0.5, "top_k": 7}))
    with LLM(folder, dtype="float32", kv_cache_memory_bytes="1M") as llm:
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.5, top_k=7)
    with LLM(folder, dtype="float32", kv_cache_memory_bytes="1M", generation_config="none") as llm:
        assert llm.get_default_sampling_params() == SamplingParams()


def test_unknown_options_are_refused_with_a_suggestion():
    with pytest.raises(ConfigError, match="Did you mean 'max_model_len'"):
        LLM(max_model_length=5)


def test_a_missing_model_is_one_clear_error(tmp_path):
    with pytest.raises(CheckpointError):
        LLM(str(tmp_path / "nothing"))


def test_close(model):
    llm = LLM(model, dtype="float32", kv_cache_memory_bytes="1M")
    llm.generate("x", params(structured_outputs=StructuredOutputs(regex="a")))
    llm.close()
    llm.close()
    with pytest.raises(EngineDead, match="closed"):
        llm.generate("x")
