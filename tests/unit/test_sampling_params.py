"""Sampling parameters: every limit from both sides, and nothing else than InvalidRequest for anything wrong."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import InvalidRequest
from phalanx.sampling_params import SamplingParams, StructuredOutputs

NUMBERS = {  # name: (least, most, least is allowed)
    "temperature": (0.0, 2.0, True),
    "top_p": (0.0, 1.0, False),
    "min_p": (0.0, 1.0, True),
    "presence_penalty": (-2.0, 2.0, True),
    "frequency_penalty": (-2.0, 2.0, True),
    "repetition_penalty": (0.0, 100.0, False),
}
INTEGERS = {
    "n": (1, 2**31 - 1),
    "top_k": (-1, 2**31 - 1),
    "seed": (-(2**63), 2**64 - 1),
    "max_tokens": (1, 2**31 - 1),
    "logprobs": (0, 2**31 - 1),
    "prompt_logprobs": (0, 2**31 - 1),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers(name):
    low, high, low_allowed = NUMBERS[name]
    assert getattr(SamplingParams(**{name: high}), name) == high
    if low_allowed:
        SamplingParams(**{name: low})
    wrong = [high + 1e-6, low - 1e-6, math.nan, math.inf, -math.inf, True, "1", [1], 1e400]
    for value in wrong if low_allowed else [*wrong, low]:
        with pytest.raises(InvalidRequest) as caught:
            SamplingParams(**{name: value})
        assert caught.value.param == name


@pytest.mark.parametrize("name", INTEGERS)
def test_integers(name):
    low, high = INTEGERS[name]
    SamplingParams(**{name: low})
    SamplingParams(**{name: high})
    for value in (low - 1, high + 1, 1.0, True, "1", math.nan, [1], 10**400):
        with pytest.raises(InvalidRequest) as caught:
            SamplingParams(**{name: value})
        assert caught.value.param == name


@pytest.mark.parametrize("name", ["stop", "bad_words"])
def test_strings(name):
    assert getattr(SamplingParams(**{name: "a"}), name) == ("a",)
    assert getattr(SamplingParams(**{name: ["a", "b"]}), name) == ("a", "b")
    assert getattr(SamplingParams(**{name: None}), name) == ()
    for value in ([""], "", [1], [None], 5, {"a": 1}, ["a", ""]):
        if value == "":
            continue  # an empty text is an absent one
        with pytest.raises(InvalidRequest) as caught:
            SamplingParams(**{name: value})
        assert caught.value.param == name


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids"])
def test_token_ids(name):
    assert getattr(SamplingParams(**{name: [0, 7]}), name) == (0, 7)
    for value in ([-1], [2**31], [1.5], ["1"], [True], [None], "ab", 5):
        with pytest.raises(InvalidRequest) as caught:
            SamplingParams(**{name: value})
        assert caught.value.param == name


@pytest.mark.parametrize(
    "bias", [{1: 101}, {1: -101}, {-1: 0}, {1: math.nan}, {"1": 0}, {1: "0"}, {1: True}, [1], "x", {2**31: 0}]
)
def test_wrong_biases(bias):
    with pytest.raises(InvalidRequest, match="logit_bias"):
        SamplingParams(logit_bias=bias)


def test_rules_between_fields():
    with pytest.raises(InvalidRequest, match="min_tokens"):
        SamplingParams(min_tokens=5, max_tokens=4)
    SamplingParams(min_tokens=5, max_tokens=None)
    with pytest.raises(InvalidRequest, match="must not be empty"):
        SamplingParams(allowed_token_ids=[])


@pytest.mark.parametrize("name", ["ignore_eos", "include_stop_str_in_output", "skip_special_tokens"])
def test_switches(name):
    for value in (1, 0, "true", None):
        with pytest.raises(InvalidRequest, match="true or false"):
            SamplingParams(**{name: value})


def test_frozen_and_greedy():
    params = SamplingParams(temperature=0)
    assert params.greedy
    assert not dataclasses.replace(params, temperature=0.1).greedy
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 1.0


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3),
    max_leaves=5,
)


@given(st.sampled_from([field.name for field in dataclasses.fields(SamplingParams)]), anything)
def test_anything_at_all_is_taken_or_refused_cleanly(name, value):
    if name == "structured_outputs":
        return  # an object of ours, made by each front end
    refused = None
    try:
        SamplingParams(**{name: value})
    except InvalidRequest as error:
        refused = error
    assert refused is None or refused.param == name


@pytest.mark.parametrize(
    "fields",
    [
        {"json": {"type": "object"}},
        {"json": "{}"},
        {"json_object": True},
        {"regex": "a+"},
        {"choice": ["a", "b"]},
        {"grammar": "start: 'a'"},
    ],
)
def test_structured_outputs(fields):
    wanted = StructuredOutputs(**fields)
    for name, value in fields.items():
        assert getattr(wanted, name) == (tuple(value) if isinstance(value, list) else value)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"regex": "a", "json_object": True},
        {"regex": ""},
        {"regex": 5},
        {"choice": []},
        {"choice": "ab"},
        {"choice": [1]},
        {"grammar": ""},
        {"json": 5},
        {"json": [1]},
    ],
)
def test_wrong_structured_outputs(fields):
    with pytest.raises(InvalidRequest) as caught:
        StructuredOutputs(**fields)
    assert caught.value.param.startswith("structured_outputs")


@pytest.mark.parametrize("wanted", [{"regex": "a"}, "a", StructuredOutputs])
def test_structured_outputs_of_another_type(wanted):
    with pytest.raises(InvalidRequest, match="must be StructuredOutputs"):
        SamplingParams(structured_outputs=wanted)
