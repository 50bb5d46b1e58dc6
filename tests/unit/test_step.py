"""The wire format between engine and workers: exact round trips, small plans, and clean refusal of anything else."""

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.step import (
    Admission,
    PromptLogprobs,
    RowFailure,
    Rows,
    SamplingState,
    StepPlan,
    StepResult,
    TokenLogprobs,
    decode_plan,
    decode_result,
    encode,
    pack,
    unpack,
)

int32 = st.integers(-(2**31), 2**31 - 1)


@given(st.lists(int32))
def test_packing_int32(values):
    assert list(unpack(pack(values))) == values


@given(st.lists(st.integers(0, 2**16 - 1)))
def test_packing_uint16(values):
    assert list(unpack(pack(values, "H"), "H")) == values


@pytest.mark.parametrize(("data", "code"), [(b"abc", "i"), (b"a", "H"), (b"abcde", "f")])
def test_unpacking_a_broken_number_is_an_error(data, code):
    with pytest.raises(ValueError, match="whole number"):
        unpack(data, code)


@pytest.mark.parametrize(("value", "code"), [(2**31, "i"), (-1, "H"), (2**16, "H")])
def test_packing_what_does_not_fit_is_an_error(value, code):
    with pytest.raises(OverflowError):
        pack([value], code)


states = st.builds(
    SamplingState,
    temperature=st.floats(0, 2),
    top_k=st.integers(0, 1000),
    seed=st.integers(0, 2**64 - 1),
    choice=st.integers(0, 127),
    logit_bias=st.dictionaries(st.integers(0, 2**31 - 1), st.floats(-100, 100), max_size=3),
    bad_words=st.lists(st.lists(int32, max_size=3).map(tuple), max_size=3).map(tuple),
    stop_token_ids=st.lists(int32, max_size=3).map(pack),
)
admissions = st.builds(
    Admission,
    slot=st.integers(0, 65535),
    tokens=st.lists(int32, min_size=1, max_size=9).map(pack),
    num_prompt=st.integers(1, 9),
    num_computed=st.integers(0, 9),
    blocks=st.lists(int32, max_size=4).map(pack),
    sampling=states,
)
plans = st.builds(
    StepPlan,
    epoch=st.integers(0, 2**40),
    step_id=st.integers(0, 2**60),
    admissions=st.lists(admissions, max_size=3),
    rows=st.builds(Rows, slots=st.binary(max_size=8), last_tokens=st.binary(max_size=8)),
    released=st.binary(max_size=4),
    masks=st.binary(max_size=64),
)


@given(plans)
def test_plans_survive_the_wire(plan):
    assert decode_plan(encode(plan)) == plan


def test_results_survive_the_wire():
    logprobs = TokenLogprobs(-0.5, 1, pack([4, 5]), pack([-0.5, -2.25], "f"))
    result = StepResult(
        epoch=3,
        step_id=9,
        slots=pack([1, 2], "H"),
        tokens=pack([7, 8]),
        logprobs={1: [logprobs]},
        prompt_logprobs=[PromptLogprobs(2, 1, [logprobs])],
        failures=[RowFailure(5, "It failed.")],
        compute_s=0.25,
    )
    assert decode_result(encode(result)) == result


def test_a_step_of_many_running_requests_is_small():
    rows = 256
    plan = StepPlan(
        epoch=1,
        step_id=10**6,
        rows=Rows(
            slots=pack(range(rows), "H"),
            num_tokens=pack([1] * rows, "H"),
            last_tokens=pack([100_000] * rows),
            block_rows=pack(range(rows // 16), "H"),
            new_blocks=pack(range(rows // 16)),
        ),
    )
    assert len(encode(plan)) <= 3072


@given(st.binary(max_size=200))
def test_noise_is_refused_as_noise(data):
    for decode in (decode_plan, decode_result):
        with contextlib.suppress(msgspec.DecodeError):  # ValidationError is one
            decode(data)


@pytest.mark.parametrize("wrong", [[], [1], ["1", 2], [1, 2, "x"], [1, 2, [], [], 5], {"epoch": 1}, None, [1.5, 2]])
def test_other_messages_are_refused(wrong):
    with pytest.raises(msgspec.ValidationError):
        decode_plan(msgspec.msgpack.encode(wrong))
