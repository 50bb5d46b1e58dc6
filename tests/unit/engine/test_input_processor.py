import dataclasses
import json
import time

import pytest

from phalanx.config import EngineConfig
from phalanx.engine.input_processor import InputProcessor
from phalanx.errors import ConfigError, ContextLengthExceeded, InvalidRequest
from phalanx.sampling_params import SamplingParams, StructuredOutputs
from tests.helpers.byte_tokenizer import byte_tokenizer

TOKENIZER = byte_tokenizer()
VOCAB = TOKENIZER.size


def processor(stated=None, *, tokenizer=TOKENIZER, validate_grammar=None, **options) -> InputProcessor:
    config = EngineConfig.from_options(**{"max_model_len": 100, **options})
    return InputProcessor(config, tokenizer, VOCAB, stated, validate_grammar=validate_grammar)


def one(inputs: InputProcessor, prompt, **params):
    (request,) = inputs.process("r", prompt, SamplingParams(**params))
    return request


def test_text_and_token_ids_become_the_same_request():
    inputs = processor(seed=5)
    text, ids = one(inputs, "hello world"), one(inputs, TOKENIZER.encode("hello world"))
    assert text == ids
    assert text.request_id == "r#0"
    assert text.sampling.max_tokens == 16
    assert text.sampling.seed == 5
    assert text.eos_token_ids == TOKENIZER.eos_token_ids


def test_n_gives_children_with_choice_numbers_and_one_seed():
    children = processor().process("r", "hello", SamplingParams(n=3, prompt_logprobs=2))
    assert [(c.request_id, c.choice) for c in children] == [("r#0", 0), ("r#1", 1), ("r#2", 2)]
    assert len({c.sampling.seed for c in children}) == 1
    assert [c.sampling.prompt_logprobs for c in children] == [2, None, None]


def test_seeds():
    inputs = processor()
    assert one(inputs, "x", seed=7).sampling.seed == 7
    assert one(inputs, "x", seed=-1).sampling.seed == 2**64 - 1
    assert one(inputs, "x", seed=-(2**63)).sampling.seed == 2**63
    drawn = {one(inputs, "x").sampling.seed for _ in range(20)}
    assert len(drawn) == 20
    assert all(0 <= seed < 2**64 for seed in drawn)
    assert one(processor(seed=3), "x", seed=9).sampling.seed == 9


def test_unset_max_tokens_takes_what_is_left():
    assert one(processor(), [1] * 60, max_tokens=None).sampling.max_tokens == 40
    assert one(processor(), [1] * 99, max_tokens=None).sampling.max_tokens == 1


def test_context_length_text():
    with pytest.raises(ContextLengthExceeded) as caught:
        processor().process("r", [1] * 90, SamplingParams(max_tokens=20), source="messages")
    assert str(caught.value) == (
        "This model's maximum context length is 100 tokens. However, you requested 110 tokens "
        "(90 in the messages, 20 in the completion). Please reduce the length of the messages or completion."
    )
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.param == "messages"
    assert caught.value.status == 400


@pytest.mark.parametrize(("length", "max_tokens"), [(100, None), (101, None), (100, 1), (5, 96), (10**6, None)])
def test_too_long_for_the_context(length, max_tokens):
    with pytest.raises(
        ContextLengthExceeded, match=r"^This model's maximum context length is 100 tokens\. However, you"
    ):
        one(processor(), [1] * length, max_tokens=max_tokens)


def test_exactly_the_context_fits():
    assert one(processor(), [1] * 80, max_tokens=20).sampling.max_tokens == 20


def test_a_hopeless_text_is_refused_before_it_is_tokenised():
    inputs = processor()
    one(inputs, "x")
    begin = time.thread_time()
    with pytest.raises(ContextLengthExceeded, match=r"at least \d+ tokens \(8000000 characters"):
        one(inputs, "x y " * 2_000_000)
    assert time.thread_time() - begin < 0.1


def test_a_text_that_may_fit_is_tokenised():
    longest = max(len(TOKENIZER.token_bytes(i)) for i in range(VOCAB))
    text = " hello" * 90  # far more characters than the context has tokens
    assert len(text) > 100
    assert longest >= 6
    assert len(one(processor(), text, max_tokens=1).prompt_token_ids) == 90


@pytest.mark.parametrize("prompt", ["", []])
def test_empty_prompt(prompt):
    with pytest.raises(InvalidRequest, match="empty"):
        one(processor(), prompt)


def test_empty_text_with_a_beginning_token():
    tokenizer = byte_tokenizer(bos=True)
    inputs = processor(tokenizer=tokenizer)
    assert one(inputs, "").prompt_token_ids == [tokenizer.bos_token_id]
    with pytest.raises(InvalidRequest, match="empty"):
        inputs.process("r", "", SamplingParams(), add_special_tokens=False)


@pytest.mark.parametrize("bad", [-1, VOCAB, 2**31, 2**63])
def test_prompt_token_ids_outside_the_vocabulary(bad):
    with pytest.raises(InvalidRequest, match=f"0 to {VOCAB - 1}"):
        one(processor(), [1, bad])


@pytest.mark.parametrize("prompt", [[1, True], [1, "1"], [1, 1.5], [1, None], 5, None, {"a": 1}, b"x"])
def test_prompts_of_the_wrong_type(prompt):
    with pytest.raises(InvalidRequest):
        one(processor(), prompt)


@pytest.mark.parametrize(
    "params", [{"logit_bias": {VOCAB: 1.0}}, {"allowed_token_ids": (VOCAB,)}, {"stop_token_ids": (VOCAB,)}]
)
def test_token_ids_of_parameters_outside_the_vocabulary(params):
    with pytest.raises(InvalidRequest) as caught:
        one(processor(), "x", **params)
    assert caught.value.param == next(iter(params))


@pytest.mark.parametrize(
    ("params", "flag"),
    [
        ({"n": 129}, "--max-n"),
        ({"logprobs": 21}, "--max-logprobs"),
        ({"prompt_logprobs": 21}, "--max-logprobs"),
        ({"stop": ("x",) * 17}, "--max-stop-strings"),
        ({"stop": ("x" * 257,)}, "--max-stop-length"),
        ({"bad_words": ("x",) * 129}, "--max-bad-words"),
        ({"bad_words": ("x" * 257,)}, "--max-stop-length"),
        ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "--max-logit-bias"),
        ({"allowed_token_ids": (1,) * 1025}, "--max-logit-bias"),
        ({"stop_token_ids": (1,) * 1025}, "--max-logit-bias"),
    ],
)
def test_limits_name_themselves(params, flag):
    with pytest.raises(InvalidRequest) as caught:
        one(processor(), "x", **params)
    assert flag in str(caught.value)
    assert caught.value.param == next(iter(params))


def test_limits_themselves_are_allowed_and_can_be_raised():
    inputs = processor(max_n=200)
    assert len(inputs.process("r", "x", SamplingParams(n=200))) == 200
    one(inputs, "x", stop=("x" * 256,) * 16, logprobs=20, prompt_logprobs=20, bad_words=("y" * 256,) * 128)
    one(inputs, "x", logit_bias={i % VOCAB: 1.0 for i in range(1024)}, stop_token_ids=(1,) * 1024)


def test_min_tokens_against_the_resolved_max_tokens():
    with pytest.raises(InvalidRequest) as caught:
        one(processor(), [1] * 90, max_tokens=None, min_tokens=11)
    assert caught.value.param == "min_tokens"
    assert one(processor(), [1] * 90, max_tokens=None, min_tokens=10).sampling.min_tokens == 10


def test_huge_numbers_are_refused_quickly():
    begin = time.thread_time()
    for params in ({"n": 2**31 - 1}, {"logprobs": 2**31 - 1}, {"max_tokens": 2**31 - 1}):
        with pytest.raises(InvalidRequest):
            one(processor(), "x", **params)
    assert time.thread_time() - begin < 0.1


@pytest.mark.parametrize(
    "options",
    [
        {"priority": True},
        {"priority": 2**40},
        {"priority": "1"},
        {"cache_salt": 5},
        {"cache_salt": "x" * 257},
        {"cache_salt": None},
    ],
)
def test_priority_and_salt(options):
    with pytest.raises(InvalidRequest) as caught:
        processor().process("r", "x", SamplingParams(), **options)
    assert caught.value.param == next(iter(options))


def test_end_of_text_ids():
    (eos,) = TOKENIZER.eos_token_ids
    assert one(processor({"eos_token_id": [eos, 7, VOCAB + 5]}), "x").eos_token_ids == (eos, 7)
    assert one(processor({"eos_token_id": 7}), "x").eos_token_ids == (eos, 7)
    assert one(processor(), "x", ignore_eos=True).eos_token_ids == ()


def test_bad_words_are_tokenised_with_and_without_a_space():
    found = one(processor(), "x", bad_words=("hello", "zq")).bad_words_token_ids
    assert found == tuple(tuple(TOKENIZER.encode(text)) for text in ("hello", " hello", "zq", " zq"))


def test_structured_outputs_are_validated_here():
    seen = []

    def refuse(wanted: StructuredOutputs) -> None:
        seen.append(wanted)
        raise InvalidRequest("no such schema")

    wanted = StructuredOutputs(regex="a+")
    with pytest.raises(InvalidRequest, match="no such schema"):
        one(processor(validate_grammar=refuse), "x", structured_outputs=wanted)
    assert seen == [wanted]
    with pytest.raises(InvalidRequest, match="not available"):
        one(processor(), "x", structured_outputs=wanted)


def test_default_sampling_comes_from_the_model():
    stated = {"temperature": 0.6, "top_p": 0.9, "top_k": 40, "repetition_penalty": 1.1, "max_new_tokens": 5, "x": 1}
    inputs = processor(stated)
    params = inputs.default_sampling(max_tokens=None, top_k=None, temperature=0.0)
    assert params == SamplingParams(temperature=0.0, top_p=0.9, top_k=40, repetition_penalty=1.1, max_tokens=None)
    assert processor(stated, generation_config="none").default_sampling() == SamplingParams()


def test_a_bad_value_in_generation_config_is_left_out():
    inputs = processor({"temperature": 99, "top_p": "x", "top_k": 3, "eos_token_id": "what"})
    assert inputs.default_sampling() == SamplingParams(top_k=3)


def test_default_sampling_suggests_names():
    with pytest.raises(ConfigError, match="Did you mean 'temperature'"):
        processor().default_sampling(temprature=1.0)
    with pytest.raises(InvalidRequest):
        processor().default_sampling(temperature=3)


def test_params_of_another_type_are_refused():
    with pytest.raises(InvalidRequest, match="SamplingParams"):
        processor().process("r", "x", {"n": 1})  # type: ignore[arg-type]


def test_no_error_echoes_the_prompt():
    secret = "tell nobody " * 200
    for prompt in (secret, [1] * 500):
        with pytest.raises(InvalidRequest) as caught:
            one(processor(), prompt)
        assert "nobody" not in str(caught.value)


def test_requests_are_complete_for_the_wire():
    request = one(processor(), "x", max_tokens=None)
    assert None not in (request.sampling.seed, request.sampling.max_tokens)
    assert dataclasses.is_dataclass(request.sampling)


LONE = "x\ud800"


@pytest.mark.parametrize(
    "params",
    [
        {"stop": (LONE,)},
        {"bad_words": (LONE,)},
        {"structured_outputs": StructuredOutputs(regex=LONE)},
        {"structured_outputs": StructuredOutputs(choice=("a", LONE))},
        {"structured_outputs": StructuredOutputs(grammar=LONE)},
        {"structured_outputs": StructuredOutputs(json=LONE)},
    ],
)
def test_half_characters_are_refused(params):
    with pytest.raises(InvalidRequest, match="surrogate"):
        one(processor(validate_grammar=lambda wanted: None), "x", **params)


def test_half_characters_in_a_salt_are_refused():
    with pytest.raises(InvalidRequest, match="surrogate"):
        processor().process("r", "x", SamplingParams(), cache_salt=LONE)


def test_schemas_travel_as_text():
    schema = {"type": "integer", "maximum": 10**30, "title": LONE}
    inputs = processor(validate_grammar=lambda wanted: None)
    request = one(inputs, "x", structured_outputs=StructuredOutputs(json=schema))
    assert json.loads(request.sampling.structured_outputs.json) == schema
    request.sampling.structured_outputs.json.encode()
