"""What is told of a start while ranks load, each at its own speed."""

from phalanx.executor.progress import SharedProgress


def test_it_is_of_all_ranks_and_one_phase_after_the_other() -> None:
    told: list[tuple[str, float]] = []
    progress = SharedProgress(2, lambda phase, share: told.append((phase, share)))
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
    assert told == [("weights", share) for share in (0.25, 0.5, 0.75, 0.75, 1.0)] + [("kv cache", 0.75)]


def test_without_anybody_to_tell_nothing_is_kept() -> None:
    progress = SharedProgress()
    progress.note(0, "weights", 0.5)
    assert not progress.has_news and not progress.tell()
