import pytest

from phalanx.engine.client import EngineOutput
from phalanx.engine.output_processor import OutputProcessor, merge
from phalanx.errors import PhalanxError
from phalanx.outputs import RequestOutput
from phalanx.step import TokenLogprobs, pack
from tests.helpers.byte_tokenizer import byte_tokenizer
from tests.helpers.engine_requests import engine_request

TOKENIZER = byte_tokenizer()
EOS = TOKENIZER.eos_token_ids[0]


def open_one(**params):
    return OutputProcessor(TOKENIZER).open([engine_request(**params)], request_id="r", prompt="abc")


def outputs(text_or_ids, *, finish="length", size=1, rid="r#0", stop_token_id=None):
    ids = TOKENIZER.encode(text_or_ids) if isinstance(text_or_ids, str) else list(text_or_ids)
    for start in range(0, len(ids), size):
        part = ids[start : start + size]
        last = start + size >= len(ids)
        yield EngineOutput(
            rid, start, part, finish_reason=finish if last else None, stop_token_id=stop_token_id if last else None
        )


def run(assembly, stream) -> RequestOutput:
    whole = None
    for output in stream:
        delta = assembly.push(output)
        if delta is not None:
            whole = delta if whole is None else merge(whole, delta)
    assert whole is not None
    return whole


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_text_is_whole_however_tokens_are_grouped(size):
    text = "héllo 世界 🙂 the stop"
    whole = run(open_one(max_tokens=99), outputs(text, size=size))
    (choice,) = whole.outputs
    assert choice.text == text
    assert choice.token_ids == TOKENIZER.encode(text)
    assert whole.finished
    assert choice.finish_reason == "length"
    assert whole.prompt == "abc"
    assert whole.prompt_token_ids == [1, 2, 3]


def test_deltas_never_hold_half_a_character():
    assembly = open_one()
    texts = [assembly.push(output).outputs[0].text for output in outputs("é🙂")]
    assert texts == ["", "é", "", "", "", "🙂"]


def test_an_unfinished_character_shows_at_the_end():
    ids = TOKENIZER.encode("🙂")[:2]
    assert run(open_one(), outputs(ids)).outputs[0].text == "�"


@pytest.mark.parametrize("size", [1, 2, 100])
@pytest.mark.parametrize("include", [False, True])
def test_stop_string_across_tokens(size, include):
    assembly = open_one(stop=("c d",), include_stop_str_in_output=include)
    whole = run(assembly, outputs("abc def", size=size, finish=None))
    (choice,) = whole.outputs
    assert choice.text == ("abc d" if include else "ab")
    assert choice.token_ids == TOKENIZER.encode("abc d")
    assert (choice.finish_reason, choice.stop_reason) == ("stop", "c d")
    assert whole.finished
    assert assembly.done("r#0")


def test_a_stop_string_beats_the_length_limit_at_the_same_token():
    (choice,) = run(open_one(stop=("c",)), outputs("abc", finish="length")).outputs
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("ab", "stop", "c")


def test_held_back_text_comes_out_at_the_end():
    (choice,) = run(open_one(stop=("cxy",)), outputs("abc", finish="length")).outputs
    assert (choice.text, choice.finish_reason) == ("abc", "length")


def test_outputs_after_a_stop_string_are_ignored():
    assembly = open_one(stop=("b",))
    run(assembly, outputs("abc", finish=None))
    assert assembly.push(EngineOutput("r#0", 3, [4], finish_reason="abort")) is None
    assert assembly.finished


def test_min_tokens_holds_stop_strings_off():
    (choice,) = run(open_one(stop=("b",), min_tokens=2), outputs("abcb!", finish=None)).outputs
    assert choice.text == "abc"
    assert len(choice.token_ids) == 4


def test_end_of_text_counts_but_does_not_show():
    (choice,) = run(open_one(eos=(EOS,)), outputs([*TOKENIZER.encode("ab"), EOS], finish="stop")).outputs
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("ab", "stop", None)
    assert choice.token_ids[-1] == EOS


def test_end_of_text_does_not_show_as_a_special_token_either():
    ids = [*TOKENIZER.encode("ab"), EOS]
    (choice,) = run(open_one(eos=(EOS,), skip_special_tokens=False), outputs(ids, finish="stop")).outputs
    assert choice.text == "ab"


@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "abc")])
def test_a_stop_token_shows_only_when_asked_for(include, text):
    stop = TOKENIZER.encode("c")[0]
    assembly = open_one(stop_token_ids=(stop,), include_stop_str_in_output=include)
    (choice,) = run(assembly, outputs("abc", finish="stop", stop_token_id=stop)).outputs
    assert (choice.text, choice.stop_reason, len(choice.token_ids)) == (text, stop, 3)


def test_the_last_token_of_a_grammar_shows():
    (choice,) = run(open_one(eos=(EOS,)), outputs("123", finish="stop")).outputs
    assert (choice.text, choice.finish_reason) == ("123", "stop")


def test_repeats_are_dropped_and_gaps_refused():
    assembly = open_one()
    assembly.push(EngineOutput("r#0", 0, [10, 11]))
    assert assembly.push(EngineOutput("r#0", 0, [10, 11])) is None
    assert assembly.push(EngineOutput("r#0", 1, [11, 12])).outputs[0].token_ids == [12]
    with pytest.raises(PhalanxError, match="lost on the way"):
        assembly.push(EngineOutput("r#0", 4, [14]))


def test_an_acknowledgement_brings_nothing():
    assert open_one().push(EngineOutput("r#0", 0)) is None


def logprobs(*values, top=()):
    return [TokenLogprobs(v, rank, pack(top), pack([-0.5] * len(top), "f")) for rank, v in enumerate(values, 1)]


def test_logprobs_have_text_bytes_and_a_running_sum():
    assembly = open_one(logprobs=1)
    ids = TOKENIZER.encode("é")
    first = assembly.push(EngineOutput("r#0", 0, ids[:1], logprobs=logprobs(-1.0, top=[ids[0]])))
    second = assembly.push(EngineOutput("r#0", 1, ids[1:], logprobs=logprobs(-0.5), finish_reason="length"))
    (entry,) = first.outputs[0].logprobs
    assert (entry.chosen.token_id, entry.chosen.logprob, entry.chosen.rank) == (ids[0], -1.0, 1)
    assert entry.chosen.data == "é".encode()[:1]
    assert [t.token_id for t in entry.top] == [ids[0]]
    assert entry.top[0].rank == 1
    assert second.outputs[0].cumulative_logprob == -1.5
    assert second.outputs[0].logprobs[0].chosen.data == "é".encode()[1:]


def test_logprobs_end_with_the_stop_string():
    assembly = open_one(logprobs=0, stop=("b",))
    ids = TOKENIZER.encode("abc")
    delta = assembly.push(EngineOutput("r#0", 0, ids, logprobs=logprobs(-1.0, -1.0, -1.0)))
    (choice,) = delta.outputs
    assert len(choice.logprobs) == len(choice.token_ids) == 2
    assert choice.cumulative_logprob == -2.0


def test_token_ids_that_the_tokenizer_does_not_know():
    assembly = open_one(logprobs=1)
    unknown = TOKENIZER.size + 3
    delta = assembly.push(EngineOutput("r#0", 0, [unknown], logprobs=logprobs(-1.0, top=[unknown])))
    assert delta.outputs[0].text == ""
    assert delta.outputs[0].logprobs[0].chosen.text == ""


def test_prompt_logprobs_come_once_and_whole():
    assembly = OutputProcessor(TOKENIZER).open(
        [engine_request(prompt=(1, 2, 3, 4), prompt_logprobs=0)], request_id="r", prompt=None
    )
    assert assembly.push(EngineOutput("r#0", 0, prompt_logprobs=logprobs(-1.0, -2.0))) is None
    delta = assembly.push(EngineOutput("r#0", 0, [9], prompt_logprobs=logprobs(-3.0)))
    first, *rest = delta.prompt_logprobs
    assert first is None
    assert [(e.chosen.token_id, e.chosen.logprob) for e in rest] == [(2, -1.0), (3, -2.0), (4, -3.0)]
    assert assembly.push(EngineOutput("r#0", 1, [9])).prompt_logprobs is None
    with pytest.raises(PhalanxError, match="prompt log-prob"):
        assembly.push(EngineOutput("r#0", 2, [9], prompt_logprobs=logprobs(-3.0)))


def test_choices_are_grouped_and_finish_together():
    children = [engine_request(f"r#{i}", choice=i, n=3) for i in range(3)]
    assembly = OutputProcessor(TOKENIZER).open(children, request_id="r", prompt=None)
    streams = [list(outputs("x" * (i + 1), rid=f"r#{i}")) for i in range(3)]
    deltas = [assembly.push(stream[i]) for i in range(3) for stream in streams if i < len(stream)]
    assert [d.finished for d in deltas] == [False] * 5 + [True]
    whole = deltas[0]
    for delta in deltas[1:]:
        whole = merge(whole, delta)
    assert {c.index: c.text for c in whole.outputs} == {0: "x", 1: "xx", 2: "xxx"}
    assert all(c.finish_reason == "length" for c in whole.outputs)


def test_metrics_and_cached_tokens():
    assembly = OutputProcessor(TOKENIZER).open([engine_request()], request_id="r", prompt=None, arrival=5.0)
    assembly.push(EngineOutput("r#0", 0))
    delta = assembly.push(EngineOutput("r#0", 0, [1], num_cached_tokens=2, scheduled_s=6.0))
    assert (delta.metrics.arrival, delta.metrics.scheduled, delta.num_cached_tokens) == (5.0, 6.0, 2)
    assert delta.metrics.first_token is not None
    assert delta.metrics.finished is None
    assert assembly.push(EngineOutput("r#0", 1, [1], finish_reason="length")).metrics.finished is not None
