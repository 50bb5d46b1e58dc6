"""A plain second implementation of the sampler, one row at a time, and a short way to call the real one."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from phalanx.sampling.parameters import SamplingTable
from phalanx.sampling.sampler import Sampled, SamplingBatch, sample
from phalanx.step import NO_TOKEN, SamplingState, unpack


@dataclass
class Row:
    logits: np.ndarray
    state: SamplingState
    prompt: tuple[int, ...] = (0,)
    output: tuple[int, ...] = ()
    allowed_by_grammar: np.ndarray | None = None
    """bool [V]."""


def pack_mask(allowed: np.ndarray) -> np.ndarray:
    """int32 words, bit t set where token t is allowed."""
    padded = np.zeros(-(-len(allowed) // 32) * 32, np.uint8)
    padded[: len(allowed)] = allowed
    return np.packbits(padded, bitorder="little").view("<i4")


def batch_of(
    rows: list[Row], slots: list[int] | None = None, span: tuple[int, int] | None = None
) -> tuple[SamplingTable, SamplingBatch]:
    """What the sampler is called with, for a rank that has the logits of the tokens `span`."""
    vocab = len(rows[0].logits)
    slots = slots or list(range(len(rows)))
    table = SamplingTable(max(slots) + 1, vocab, span)
    for slot, row in zip(slots, rows, strict=True):
        # The output comes token by token, so that counts are kept as they are in a running worker.
        table.admit(slot, row.state, np.array(row.prompt, np.int32), len(row.prompt))
        for token in row.output:
            table.append(np.array([slot]), np.array([token], np.int32))
    masked = [i for i, row in enumerate(rows) if row.allowed_by_grammar is not None]
    batch = SamplingBatch(
        slots=np.array(slots),
        lengths=np.array([len(row.prompt) + len(row.output) for row in rows]),
        outputs=np.array([len(row.output) for row in rows]),
        produced=lambda i: np.array(rows[i].output, np.int32),
        mask_rows=np.array(masked, np.int64),
        masks=np.array([pack_mask(rows[i].allowed_by_grammar) for i in masked], np.int32).reshape(
            len(masked), -(-vocab // 32)
        ),
    )
    return table, batch


def sample_rows(rows: list[Row], slots: list[int] | None = None) -> Sampled:
    table, batch = batch_of(rows, slots)
    logits = torch.from_numpy(np.stack([row.logits for row in rows]).astype(np.float32))
    return sample(logits, table, batch)


def _mix(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def _mix_low(x: int) -> int:
    x = (x ^ (x >> 16)) * 0x7FEB352D % 2**32
    x = (x ^ (x >> 15)) * 0x846CA68B % 2**32
    return x ^ (x >> 16)


def reference_key(seed: int, choice: int, position: int) -> int:
    state = _mix((seed + 0x9E3779B97F4A7C15) % 2**64)
    for word in (choice, position, 0):
        state = _mix(((state ^ word) + 0x9E3779B97F4A7C15) % 2**64)
    return state


def reference_word(key: int, token: int) -> int:
    return _mix_low((_mix_low(token ^ (key % 2**32)) + (key >> 32)) % 2**32)


def reference_logits(row: Row) -> np.ndarray:
    """What the draw sees, before temperature: float32 as the real one, token by token."""
    state = row.state
    logits = row.logits.astype(np.float32).copy()
    inf = np.float32(-np.inf)
    for token in range(len(logits)):
        if row.allowed_by_grammar is not None and not row.allowed_by_grammar[token]:
            logits[token] = inf
        if state.allowed_token_ids and token not in unpack(state.allowed_token_ids):
            logits[token] = inf
        if len(row.output) < state.min_tokens and token in unpack(state.stop_token_ids):
            logits[token] = inf
    for word in state.bad_words:
        head = tuple(word[:-1])
        if row.output[len(row.output) - len(head) :] == head and len(row.output) >= len(head):
            logits[word[-1]] = inf
    for token, bias in state.logit_bias.items():
        logits[token] += np.float32(bias)
    for token in set(row.prompt) | set(row.output):
        rep = np.float32(state.repetition_penalty)
        logits[token] = logits[token] / rep if logits[token] > 0 else logits[token] * rep
    for token in set(row.output):
        logits[token] -= np.float32(state.frequency_penalty) * np.float32(row.output.count(token))
        logits[token] -= np.float32(state.presence_penalty)
    return logits


def reference_token(row: Row) -> int:
    """The token by the plain definition, in double precision: sort everything, keep, and race among all that is left.

    NO_TOKEN when the constraints leave none.
    """
    state = row.state
    logits = reference_logits(row).astype(np.float64)
    order = sorted(range(len(logits)), key=lambda t: (-logits[t], t))
    order = [t for t in order if logits[t] > -np.inf]
    if not order:
        return NO_TOKEN
    if state.temperature < 1e-5:
        return order[0]
    best = logits[order[0]]
    weight = {t: math.exp((logits[t] - best) / state.temperature) for t in order}
    kept = [t for t in order if weight[t] >= state.min_p]
    if state.top_k > 0:
        kept = kept[: state.top_k]
    total = sum(weight[t] for t in kept)
    nucleus, mass = [], 0.0
    for t in kept:
        if mass >= state.top_p * total and state.top_p < 1:
            break
        nucleus.append(t)
        mass += weight[t]
    key = reference_key(state.seed, state.choice, len(row.prompt) + len(row.output))

    def loses_by(token: int) -> tuple[float, int]:
        number = -math.log1p(-(reference_word(key, token) + 0.5) / 2**32)
        return math.log(number) - logits[token] / state.temperature, token

    return min(nucleus, key=loses_by)
