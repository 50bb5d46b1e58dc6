"""What one request knows by itself: when it is finished, and what its workers are told."""

from __future__ import annotations

import pytest

from phalanx.engine.request import Request
from phalanx.errors import InvalidRequest
from phalanx.sampling_params import SamplingParams
from phalanx.step import PromptLogprobs, TokenLogprobs, unpack
from tests.helpers.engine_driver import make_request


def request_with(*output: int, **options: object) -> Request:
    request = Request.create(make_request("a", [1, 2, 3], **options), 0, 0.0, 100)  # type: ignore[arg-type]
    request.tokens += output
    return request


@pytest.mark.parametrize(
    ("output", "options", "wanted"),
    [
        ((), {"eos_token_ids": (3,)}, (None, None)),  # the prompt ends nothing
        ((5,), {}, (None, None)),
        ((5,), {"eos_token_ids": (5,)}, ("stop", None)),
        ((5,), {"stop_token_ids": (4, 5)}, ("stop", 5)),
        ((5,), {"stop_token_ids": (5,), "eos_token_ids": (5,)}, ("stop", None)),
        ((5,), {"eos_token_ids": (5,), "min_tokens": 1}, (None, None)),
        ((6, 5), {"eos_token_ids": (5,), "min_tokens": 1}, ("stop", None)),
        ((5, 6), {"max_tokens": 2}, ("length", None)),
        ((5, 6), {"max_tokens": 2, "eos_token_ids": (6,)}, ("stop", None)),
        ((5, 6), {"max_tokens": 2, "min_tokens": 2, "eos_token_ids": (6,)}, ("length", None)),
    ],
)
def test_what_ends_a_request(
    output: tuple[int, ...], options: dict[str, object], wanted: tuple[object, object]
) -> None:
    assert request_with(*output, **options).finish() == wanted


def admitted(**options: object) -> Request:
    request = request_with(**options)
    request.slot = 0
    return request


def test_workers_are_told_every_parameter() -> None:
    options = {
        "top_k": -1,
        "top_p": 0.5,
        "min_p": 0.25,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
        "logit_bias": {7: 2.0},
        "allowed_token_ids": (7, 8),
        "min_tokens": 2,
        "stop_token_ids": (8, 9),
        "logprobs": 0,
        "prompt_logprobs": 3,
    }
    state = admitted(**options, eos_token_ids=(9, 10), choice=4, bad_words_token_ids=((1, 2),)).admission().sampling
    assert (state.temperature, state.top_k, state.top_p, state.min_p) == (0.0, 0, 0.5, 0.25)
    assert (state.presence_penalty, state.frequency_penalty, state.repetition_penalty) == (0.5, -0.5, 1.5)
    assert (state.choice, state.bad_words, state.logit_bias) == (4, ((1, 2),), {7: 2.0})
    assert list(unpack(state.allowed_token_ids)) == [7, 8]
    assert list(unpack(state.stop_token_ids)) == [9, 10, 8]
    assert (state.min_tokens, state.logprobs, state.prompt_logprobs) == (2, 0, 3)


def test_what_was_not_asked_for_is_not_reported() -> None:
    state = admitted().admission().sampling
    assert (state.logprobs, state.prompt_logprobs, state.allowed_token_ids) == (-1, -1, b"")


@pytest.mark.parametrize(("seed", "wanted"), [(0, 0), (-1, 2**64 - 1), (2**64 - 1, 2**64 - 1)])
def test_seeds_travel_as_unsigned_64_bits(seed: int, wanted: int) -> None:
    given = make_request("a", [1])
    sampling = SamplingParams(max_tokens=1, seed=seed)
    request = Request.create(type(given)("a", [1], sampling), 0, 0.0, 100)
    request.slot = 0
    assert request.admission().sampling.seed == wanted


@pytest.mark.parametrize("missing", ["seed", "max_tokens"])
def test_unresolved_parameters_are_refused(missing: str) -> None:
    sampling = SamplingParams(**{"max_tokens": 1, "seed": 0, missing: None})
    given = make_request("a", [1])
    with pytest.raises(InvalidRequest, match="must be set"):
        Request.create(type(given)("a", [1], sampling), 0, 0.0, 100)


def test_prompt_logprobs_that_come_again_are_dropped() -> None:
    request = request_with(prompt_logprobs=0)
    entries = [TokenLogprobs(float(number), 1) for number in range(1, 6)]
    assert request.new_prompt_logprobs(PromptLogprobs(0, 1, entries[:2])) == entries[:2]
    assert request.new_prompt_logprobs(PromptLogprobs(0, 1, entries[:1])) == []
    assert request.new_prompt_logprobs(PromptLogprobs(0, 2, entries[1:4])) == entries[2:4]
    assert request.new_prompt_logprobs(PromptLogprobs(0, 5, entries[4:])) == entries[4:]
