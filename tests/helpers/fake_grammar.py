"""A grammar without a language: which tokens are allowed depends on how many came before."""

from __future__ import annotations

import numpy as np

from phalanx.sampling_params import StructuredOutputs


class FakeGrammar:
    """Allows about half of the tokens at each position; complete after `length` tokens."""

    def __init__(self, seed: int, length: int) -> None:
        self.seed = seed
        self.length = length
        self.count = 0

    @property
    def terminated(self) -> bool:
        return self.count >= self.length

    def accept(self, token_id: int) -> bool:
        if not self._allows(token_id):
            return False
        self.count += 1
        return True

    def fill_mask(self, out: np.ndarray) -> None:
        bits = np.array([self._allows(token) for token in range(len(out) * 32)])
        out[:] = np.packbits(bits, bitorder="little").view(np.int32)

    def fork(self) -> FakeGrammar:
        other = FakeGrammar(self.seed, self.length)
        other.count = self.count
        return other

    def _allows(self, token: int) -> bool:
        return (token * 5 + self.count * 3 + self.seed) % 7 < 4


def structured(seed: int, length: int) -> StructuredOutputs:
    return StructuredOutputs(regex=f"{seed},{length}")


def compile_fake(asked: StructuredOutputs) -> FakeGrammar:
    seed, length = (asked.regex or "").split(",")
    return FakeGrammar(int(seed), int(length))
