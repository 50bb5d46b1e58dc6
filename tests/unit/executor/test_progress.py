"""What is told of a start while ranks load, each at its own speed."""

from phalanx.executor.progress import SharedProgress, in_words


def test_it_is_of_all_ranks_and_one_phase_after_the_other() -> None:
    told: list[tuple[str, float, str]] = []
    progress = SharedProgress(2, lambda *what: told.append(what))
    assert not progress.tell() and not progress.has_news
    for rank, phase, share in (
        (0, "weights", 0.5),
        (0, "weights", 1.0),
        (0, "kv cache", 1.0),  # the other one still loads
        (1, "weights", 0.5),
        (1, "weights", 0.25),  # never back
        (1, "weights", 1.0),
        (1, "kv cache", 0.5),
    ):
        progress.note(rank, phase, share)
    assert progress.has_news and told == []
    assert progress.tell() and not progress.has_news
    assert told == [
        ("weights", 0.25, "rank 0 50%, rank 1 0%"),
        ("weights", 0.5, "rank 0 100%, rank 1 0%"),
        ("weights", 0.75, "rank 0 100%, rank 1 50%"),
        ("weights", 0.75, "rank 0 100%, rank 1 50%"),
        ("weights", 1.0, ""),
        ("kv cache", 0.75, "rank 0 100%, rank 1 50%"),
    ]


def test_of_many_ranks_those_that_are_furthest_behind_are_named() -> None:
    assert in_words("rank", {0: 0.8, 1: 0.46, 2: 1.0, 3: 0.1}) == "rank 1 46%, rank 3 10%, …"
    assert in_words("rank", {0: 0.5}) == in_words("rank", {0: 0.5, 1: 0.5}) == ""


def test_without_anybody_to_tell_nothing_is_kept() -> None:
    progress = SharedProgress()
    progress.note(0, "weights", 0.5)
    assert not progress.has_news and not progress.tell()
