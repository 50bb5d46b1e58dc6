"""Who is suspected, tried alone, refused or cleared."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from phalanx.engine.poison import CLEARED_BY, Quarantine, refusal


def test_one_loss_is_no_suspicion() -> None:
    quarantine = Quarantine()
    assert quarantine.lost(["a", "b"]) == []
    assert quarantine.alone is None
    assert quarantine


def test_two_losses_in_a_row_are_and_a_third_alone_is_the_end() -> None:
    quarantine = Quarantine()
    for _ in range(2):
        assert quarantine.lost(["a", "b", "c"]) == []
    assert quarantine.suspects == ("a", "b", "c")
    assert quarantine.alone == "a"
    assert quarantine.lost(["a"]) == ["a"]
    assert quarantine.alone == "b"


def test_tokens_made_alone_clear() -> None:
    quarantine = Quarantine()
    for _ in range(2):
        quarantine.lost(["a", "b"])
    quarantine.made("a")
    assert quarantine.alone == "a", "its first token comes from computing everything anew"
    quarantine.made("a", CLEARED_BY - 1)
    assert quarantine.suspects == ("b",)
    quarantine.ended("b")
    assert not quarantine


def losses_until(tokens: int, refused: bool) -> int | None:
    """How many losses with so many tokens in between make a suspect, or end in a refusal."""
    quarantine = Quarantine()
    for losses in range(1, 100):
        if quarantine.lost(["a"]) or (not refused and quarantine.alone):
            return losses
        quarantine.made("a", tokens)
    return None


def test_one_token_in_between_makes_a_loss_weigh_half_and_two_make_it_nothing() -> None:
    assert [losses_until(tokens, False) for tokens in (0, 1, CLEARED_BY)] == [2, 3, None]
    assert [losses_until(tokens, True) for tokens in (0, 1, CLEARED_BY)] == [3, 5, None]


def test_a_loss_without_it_takes_it_out_of_the_row() -> None:
    quarantine = Quarantine()
    quarantine.lost(["a"])
    quarantine.lost(["b"])
    quarantine.lost(["a"])
    assert quarantine.suspects == ()


def test_a_loss_of_nobody_changes_nothing() -> None:
    quarantine = Quarantine()
    quarantine.lost(["a"])
    quarantine.lost([])
    quarantine.lost(["a"])
    assert quarantine.alone == "a"
    assert quarantine.lost([]) == []
    assert quarantine.lost(["a"]) == ["a"]


def test_the_refusal_says_not_to_try_again() -> None:
    assert (refusal().status, refusal().code, refusal().retryable) == (500, "poison_request", False)


@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=8),
    deadly=st.sets(st.integers(0, 7)),
    lives=st.integers(1, 6),
    outside=st.lists(st.booleans(), max_size=60),
)
def test_the_deadly_are_refused_and_all_others_finish(
    lengths: list[int], deadly: set[int], lives: int, outside: list[bool]
) -> None:
    """Everyone who may run makes a token a step, but a deadly one at its token `lives` (again and again), and losses
    from outside, which spare those that are tried alone."""
    quarantine = Quarantine()
    left = {str(number): length for number, length in enumerate(lengths)}
    wanted = {r for r in left if int(r) in deadly and lengths[int(r)] > lives}
    made = dict.fromkeys(left, 0)
    refused: set[str] = set()
    losses = 0
    for turn in range(2000):
        if not left:
            break
        alone = quarantine.alone
        running = [r for r in left if alone in (None, r)]
        assert running, "nobody may run"
        by_itself = [r for r in running if r in wanted and made[r] == lives]
        if by_itself or (alone is None and turn < len(outside) and outside[turn]):
            losses += bool(by_itself)
            for r in quarantine.lost(running):
                refused.add(r)
                del left[r]
            continue
        for r in running:
            made[r] += 1
            left[r] -= 1
            if not left[r]:
                del left[r]
                quarantine.ended(r)
            else:
                quarantine.made(r)
    assert not left
    assert refused == wanted
    assert losses <= 3 * len(wanted)
