"""The checker of histories finds what is wrong with bad ones, and nothing in good ones."""

from __future__ import annotations

import json
import random

import pytest

from tests.helpers.cases import EXECUTORS, FAULTS, all_cases, pairs, pairwise, parse, random_case, why_not
from tests.helpers.history import (
    DONE,
    Answer,
    Baseline,
    Event,
    Log,
    Outage,
    Sample,
    assemble,
    check_counts,
    check_gap,
    check_health,
    check_rest,
    check_stream,
    longest_gap,
    next_event_after,
    tells,
)

WORDS = ["The", " quick", " brown", " fox", " jumps", " over", " a", " dog"]


def frame(text: str, finish: str | None = None, index: int = 0, **more: object) -> Event:
    logprobs = {"tokens": [text], "token_logprobs": [-1.5]} if text else None
    choice = {"index": index, "text": text, "finish_reason": finish, "logprobs": logprobs}
    return Event(0.0, json.dumps({"id": "cmpl-1", "choices": [choice], "usage": None, **more}))


def usage(tokens: int) -> Event:
    count = {"prompt_tokens": 3, "completion_tokens": tokens, "total_tokens": 3 + tokens}
    return Event(0.0, json.dumps({"id": "cmpl-1", "choices": [], "usage": count}))


def history(*events: Event) -> Log:
    events = events or (
        *(frame(word) for word in WORDS[:-1]),
        frame(WORDS[-1], "length"),
        usage(len(WORDS)),
        Event(0.0, DONE),
    )
    log = Log("ask", sent=10.0, status=200, closed=10.1 + 0.1 * len(events))
    log.events = [Event(10.1 + 0.1 * i, event.data) for i, event in enumerate(events)]
    return log


@pytest.fixture
def oracle() -> Answer:
    return assemble(history())


def without(log: Log, index: int) -> Log:
    return history(*(event for i, event in enumerate(log.events) if i != index))


def test_a_good_one(oracle):
    assert check_stream(history(), oracle) == []
    assert oracle.choices[0].text == "The quick brown fox jumps over a dog"
    assert oracle.usage == {"prompt_tokens": 3, "completion_tokens": 8}
    assert tells(oracle)


class TestMutants:
    """What a system without fencing, or with a bad cursor, would show."""

    @pytest.mark.parametrize("lost", range(7))
    def test_one_committed_token_lost(self, oracle, lost):
        assert any("differs in its text" in c for c in check_stream(without(history(), lost), oracle))

    @pytest.mark.parametrize("twice", range(7))
    def test_one_token_replayed_twice(self, oracle, twice):
        log = history()
        events = [*log.events[: twice + 1], log.events[twice], *log.events[twice + 1 :]]
        assert any("differs in its text" in c for c in check_stream(history(*events), oracle))

    def test_two_tokens_swapped(self, oracle):
        log = history()
        log.events[2], log.events[3] = log.events[3], log.events[2]
        assert check_stream(log, oracle)

    def test_a_token_of_a_rank_that_was_given_up(self, oracle):
        """Without fencing, a late result commits the same step again, here with the draw that another state makes."""
        log = history()
        log.events[4] = frame(" sleeps")
        complaints = check_stream(log, oracle)
        assert any("text" in c for c in complaints) and any("tokens at 4 of 8" in c for c in complaints)

    def test_a_lost_token_made_up_for_at_the_end(self, oracle):
        log = history()
        events = [*log.events[:3], *log.events[4:7], frame(" dog"), frame(" barks", "length"), *log.events[8:]]
        assert check_stream(history(*events), oracle)

    def test_logprobs_of_another_state(self, oracle):
        log = history()
        log.events[3] = Event(10.4, log.events[3].data.replace("-1.5", "-1.49"))
        assert check_stream(log, oracle) == ["ask: choice 0 has other logprobs, by up to 0.01"]
        log.events[3] = Event(10.4, log.events[3].data.replace("-1.49", "-1.50001"))
        assert check_stream(log, oracle) == []

    def test_choices_mixed_up(self):
        right = history(frame("a"), frame("b", index=1), frame("c", "stop"), frame("d", "stop", index=1), usage(4),
                        Event(0.0, DONE))  # fmt: skip
        wrong = history(frame("a"), frame("b", index=1), frame("d", "stop"), frame("c", "stop", index=1), usage(4),
                        Event(0.0, DONE))  # fmt: skip
        assert check_stream(right, assemble(right)) == []
        assert len(check_stream(wrong, assemble(right))) == 4


class TestEnds:
    def test_none(self, oracle):
        assert "ask: 0 ends instead of one" in check_stream(without(history(), 9), oracle)

    def test_two(self, oracle):
        log = history()
        log.events.append(log.events[-1])
        complaints = check_stream(log, oracle)
        assert "ask: 2 ends instead of one" in complaints and "ask: 1 events after the end" in complaints

    def test_something_after_it(self, oracle):
        log = history()
        log.events.append(frame("more"))
        assert any("after the end" in c for c in check_stream(log, oracle))

    def test_a_choice_that_goes_on(self, oracle):
        log = history()
        log.events.insert(8, frame("!"))
        assert "ask: choice 0 goes on after it finished" in check_stream(log, oracle)

    def test_an_error(self, oracle):
        error = Event(0.0, json.dumps({"error": {"message": "The engine died."}}))
        log = history(*history().events[:4], error, Event(0.0, DONE))
        complaints = check_stream(log, oracle)
        assert "ask: it ended with an error: The engine died." in complaints
        log = history(*history().events[:4], error, frame("x"), Event(0.0, DONE))
        assert "ask: an event after the error" in check_stream(log, oracle)

    def test_another_finish_reason_and_usage(self, oracle):
        log = history(*history().events[:7], frame(WORDS[-1], "stop"), usage(9), Event(0.0, DONE))
        assert check_stream(log, oracle) == [
            "ask: choice 0 finished with stop instead of length",
            "ask: usage is {'prompt_tokens': 3, 'completion_tokens': 9} instead of "
            "{'prompt_tokens': 3, 'completion_tokens': 8}",
        ]

    def test_a_connection_that_breaks(self, oracle):
        log = history()
        log.broken = "reset"
        assert check_stream(log, oracle) == ["ask: the stream broke off: reset"]

    def test_a_second_id(self, oracle):
        log = history()
        log.events[5] = Event(10.6, log.events[5].data.replace("cmpl-1", "cmpl-2"))
        assert check_stream(log, oracle) == ["ask: 2 ids in one answer"]

    def test_refusals(self, oracle):
        assert check_stream(Log("ask", status=503, retry_after="5"), oracle) == []
        assert check_stream(Log("ask", status=503), oracle)
        assert check_stream(Log("ask", status=500, retry_after="5", body="no"), oracle)
        assert check_stream(Log("ask", broken="refused"), oracle)


def test_silence():
    log = history()
    for event in log.events[4:]:
        event.at += 3
    log.closed += 3
    began, longest = longest_gap(log)
    assert (round(began, 3), round(longest, 3)) == (10.4, 3.1)
    assert check_gap(log, 3.2) == []
    assert check_gap(log, 3.0) == ["ask: silent for 3.10 s, 0.40 s after it was sent; the bound is 3 s"]
    assert check_gap(Log("ask", sent=0.0, closed=9.0), 5.0)
    assert next_event_after([log, history()], 10.45) == pytest.approx(3.05)
    assert next_event_after([log], 10.25) == pytest.approx(3.25)  # two more were on their way
    assert next_event_after([log], 99) is None
    assert next_event_after([log], 10.0) is None


class TestHealth:
    outage = (Outage(18.0, 20.0, 25.0),)
    able = (10.0, 40.0)

    def check(self, *samples: tuple[float, bool | None]) -> list[str]:
        return check_health([Sample(*sample) for sample in samples], self.outage, able=self.able)

    def test_the_truth(self):
        assert (
            self.check(
                (5, False), (12, True), (19, False), (20.9, True), (21.5, False), (25.9, False), (30, True), (50, False)
            )
            == []
        )

    @pytest.mark.parametrize("sample", [(22, True), (15, False), (27, False), (15, None)])
    def test_lies(self, sample):
        assert len(self.check(sample)) == 1


def test_what_is_left():
    before = Baseline(10, 10, {"rank": 2}, frozenset({"a"}), 1)
    assert check_rest(before, before) == []
    worse = Baseline(9, 10, {"rank": 3}, frozenset({"a", "b"}), 2, running=1)
    assert len(check_rest(before, worse)) == 5


def test_counts():
    killed, hung = frozenset({"killed"}), frozenset({"hung", "network"})
    assert check_counts([killed, hung], {"killed": 1, "network": 1, "failed": 0}) == []
    assert check_counts([], {}) == []
    for counted in ({"killed": 1}, {"killed": 2, "hung": 1}, {"killed": 1, "hung": 1, "failed": 1}):
        assert check_counts([killed, hung], counted)


def test_an_oracle_that_would_hide_a_loss():
    log = history(*(frame("ha") for _ in range(20)), frame("ha", "length"), usage(21), Event(0.0, DONE))
    assert not tells(assemble(log))


class TestCases:
    def test_words_are_read_back(self):
        for case in pairwise(3):
            assert parse(str(case)) == case

    @pytest.mark.parametrize(
        ("line", "reason"),
        [
            ("fault=kill target=rank3 phase=decode executor=mp layout=tp2", "only 2 ranks"),
            ("fault=cut target=host phase=decode executor=mp layout=tp2", "no link"),
            ("fault=kill target=raylet phase=decode executor=mp layout=tp2", "only Ray"),
            ("fault=raise target=rank0 phase=idle executor=mp layout=tp2", "nothing runs"),
            ("fault=kill target=rank0 phase=noon executor=mp layout=tp2", "no such"),
            ("fault=kill target=rank0", "not a case"),
        ],
    )
    def test_what_there_is_not(self, line, reason):
        with pytest.raises(ValueError, match=reason):
            parse(line)

    @pytest.mark.parametrize("executor", EXECUTORS)
    def test_every_pair_is_met(self, executor):
        chosen = pairwise(1, [executor])
        assert chosen == pairwise(1, [executor])
        assert not any(map(why_not, chosen))
        met = set().union(*map(pairs, chosen))
        everything = list(all_cases([executor]))
        assert met == set().union(*map(pairs, everything))
        assert len(chosen) < len(everything) / 5
        assert len({str(case).rpartition(" seed")[0] for case in chosen}) == len(chosen)

    def test_each_fault_has_a_place_in_every_way_it_can(self):
        rng = random.Random(5)
        assert {random_case(rng).fault for _ in range(400)} == set(FAULTS)
