"""What became of proposed tokens (`--speculative-config`), as an engine counts it."""

from __future__ import annotations

from itertools import zip_longest

import msgspec


class SpeculationCounts(msgspec.Struct):
    """Since the start; counts of several engines add up."""

    drafts: int = 0
    """Times that tokens were proposed for a request."""
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_at: list[int] = []
    """How often the first proposed token was accepted, the second, and so on; empty where nothing is ever proposed."""

    def note(self, proposed: int, accepted: int) -> None:
        """Of `proposed` tokens, the first `accepted`."""
        self.drafts += 1
        self.draft_tokens += proposed
        self.accepted_tokens += accepted
        for place in range(accepted):
            self.accepted_at[place] += 1

    def __add__(self, other: SpeculationCounts) -> SpeculationCounts:
        return SpeculationCounts(
            self.drafts + other.drafts,
            self.draft_tokens + other.draft_tokens,
            self.accepted_tokens + other.accepted_tokens,
            [one + two for one, two in zip_longest(self.accepted_at, other.accepted_at, fillvalue=0)],
        )

    def since(self, earlier: SpeculationCounts) -> SpeculationCounts:
        """What has come after `earlier`."""
        return SpeculationCounts(
            self.drafts - earlier.drafts,
            self.draft_tokens - earlier.draft_tokens,
            self.accepted_tokens - earlier.accepted_tokens,
            [one - two for one, two in zip_longest(self.accepted_at, earlier.accepted_at, fillvalue=0)],
        )

    def __radd__(self, other: int) -> SpeculationCounts:
        """For `sum`, which begins with 0."""
        return self
