"""`Patience`: when an engine process counts as hung, by its signs of life.

It is stopped, or one native call holds its interpreter, when it is silent; it is stuck when it talks but neither its
loop nor its workers move. Time is counted in the front end's own turns (`look`), each for no more than it should have
taken: a front end that was itself stopped or starved blames nobody. Pure; reads no clock and ends nothing.
"""

from __future__ import annotations

SILENCE_S = 3.0
"""A process silent for less is never called hung, nor one for six times its longest silence so far, up to the
configured bound."""
QUIET_S = 1.0
"""A process silent for less is called ready, and one for three times its longest silence so far."""
LOOK_S = 0.25
"""Between two looks."""
FIRST_STEPS = 6.0
"""So many times the bound may pass before the first tokens: memory is touched, kernels are built."""
MARGIN_S = 3.0
"""Added to the bound of an executor that watches its workers itself and should notice first."""


class Patience:
    def __init__(self, hang_timeout: float, now: float):
        """`hang_timeout` in seconds; `now` is monotonic, as everywhere here."""
        self._hang_timeout = hang_timeout
        self._looked = self.last_heard = now
        self.silent = 0.0
        """Seconds since the last message, by our own turns."""
        self.stalled = 0.0
        """Seconds since the engine last got something done, likewise."""
        self._longest_silence = 0.0
        self._longest_stall = 0.0
        self._moved: tuple[int, int] | None = None
        self._executor_bound = 0.0
        self._warm = False

    def heard(self, now: float) -> None:
        """A message came, of any kind."""
        self._longest_silence = max(self._longest_silence, min(self.silent, now - self.last_heard))
        self.last_heard = now
        self.silent = 0.0

    def moved(self, turns: int, progress: int, *, hang_bound: float, warm: bool) -> None:
        """What a beat says. `hang_bound` is the executor's, 0 when it does not watch; `warm` once tokens were made."""
        self._executor_bound, self._warm = hang_bound, warm
        if (turns, progress) != self._moved:
            self._moved = (turns, progress)
            self.advanced()

    def advanced(self) -> None:
        """A step ended or a share of the loading is done."""
        if self._warm:
            self._longest_stall = max(self._longest_stall, self.stalled)
        self.stalled = 0.0

    @property
    def silence_bound(self) -> float:
        return max(SILENCE_S, min(6 * self._longest_silence, self._hang_timeout))

    @property
    def quiet(self) -> bool:
        """Silent for so long that nobody should call it ready, though it need not be lost."""
        return self.silent > min(max(QUIET_S, 3 * self._longest_silence), self.silence_bound)

    @property
    def hang_bound(self) -> float:
        """Seconds without anything done after which a worker counts as hung now."""
        if self._executor_bound > 0:
            return self._executor_bound
        longest = self._hang_timeout * FIRST_STEPS
        return min(max(self._hang_timeout, 10 * self._longest_stall), longest) if self._warm else longest

    def look(self, now: float) -> str | None:
        """Call it every `LOOK_S`. Why the engine counts as hung, in words that follow "it"; None when it does not."""
        passed = min(now - self._looked, 2 * LOOK_S)
        self._looked = now
        self.silent += passed
        self.stalled += passed
        if self.silent > self.silence_bound:
            return f"it has not answered for {self.silent:.1f} s"
        allowed = self.hang_bound + (MARGIN_S if self._executor_bound > 0 else 0.0)
        if self._moved is not None and self.stalled > allowed:
            return f"it has made no progress for {self.stalled:.0f} s"
        return None
