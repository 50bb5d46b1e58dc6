"""A careless little engine for the executor tests: random plans, and a reference that starts from scratch each step.

`Script.next` invents a legal step: new requests, prompts in chunks of any size, decodes with the token on the workers
or sent along, shared prefixes, preemption and resumption in other slots and blocks. `Reference` answers the same
question, one request at a time, the whole context in one piece through an empty cache, with the plain sampler.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from phalanx.models.decoder import Decoder
from phalanx.step import NO_TOKEN, ON_DEVICE, Admission, SamplingState, StepPlan, pack
from tests.helpers.plans import Answer, Run, admission, plan
from tests.helpers.sampling import Row, reference_token
from tests.helpers.stepping import Driver


class Reference:
    """Everything recomputed for every question."""

    def __init__(self, decoder: Decoder):
        self.decoder = decoder
        self._known: dict[tuple[tuple[int, ...], int], np.ndarray] = {}

    def logits(self, tokens: list[int], num_prompt: int) -> np.ndarray:
        """float32 [tokens, vocab], remembered because several requests may ask for the same."""
        key = (tuple(tokens), num_prompt)
        if key not in self._known:
            driver = Driver(self.decoder, blocks=-(-len(tokens) // 4), block_size=4)
            stream = driver.stream(tokens)
            stream.prompt_len = num_prompt
            self._known[key] = driver.prefill(stream).float().numpy()
        return self._known[key]

    def token(
        self, tokens: list[int], num_prompt: int, sampling: SamplingState, allowed: np.ndarray | None = None
    ) -> int:
        row = Row(
            logits=self.logits(tokens, num_prompt)[-1],
            state=sampling,
            prompt=tuple(tokens[:num_prompt]),
            output=tuple(tokens[num_prompt:]),
            allowed_by_grammar=allowed,
        )
        return reference_token(row)

    def logprobs(self, tokens: list[int], num_prompt: int) -> np.ndarray:
        """float64 [tokens, vocab]."""
        return torch.from_numpy(self.logits(tokens, num_prompt)).double().log_softmax(-1).numpy()

    def generate(self, prompt: list[int], count: int, sampling: SamplingState) -> list[int]:
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(self.token(tokens, len(prompt), sampling))
        return tokens[len(prompt) :]


@dataclass(eq=False)
class Request:
    tokens: list[int]
    num_prompt: int
    sampling: SamplingState
    slot: int | None = None
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    unsent: bool = False
    """The last token came from the workers and has not been appended there."""
    steps: int = 0
    grammar: bool = False
    accepted: tuple[int, ...] = ()
    """Proposed tokens that came true in its latest step; the workers have not been told."""
    proposed: bool = False
    """Tokens were proposed in its latest step."""


@dataclass
class Expected:
    """A row that samples: a mask for each token, when it has a grammar, and what is proposed."""

    request: Request
    masks: list[np.ndarray] | None
    proposed: tuple[int, ...]

    def chain(self, reference: Reference) -> list[int]:
        """The tokens that it must be given."""
        request, chain = self.request, []
        for place, wanted in enumerate([*self.proposed, None]):
            mask = None if self.masks is None else self.masks[place]
            tokens = request.tokens + chain
            chain.append(reference.token(tokens, request.num_prompt, request.sampling, mask))
            if chain[-1] != wanted:
                break
        return chain


@dataclass
class Script:
    """The state of the engine. `expect` after each `next` says which requests sample, and with which masks. With a
    `reference` tokens are proposed, many of them right."""

    rng: np.random.Generator
    vocab: int
    slots: int
    blocks: int
    block_size: int
    max_len: int
    epoch: int = 0
    step: int = 0
    on_device: bool = True
    """Whether a plan may leave the last token where it was drawn."""
    reference: Reference | None = None
    requests: list[Request] = field(default_factory=list)
    expect: list[Expected] = field(default_factory=list)

    def next(self) -> StepPlan:
        """The next plan; the executor's answer goes to `take`."""
        self.step += 1
        rng, releases = self.rng, []
        for request in [r for r in self.requests if r.slot is not None]:
            done = len(request.tokens) >= self.max_len - 1 or request.steps > 40
            if done or rng.random() < 0.06:
                releases.append(request.slot)
                request.slot, request.blocks, request.computed, request.unsent = None, [], 0, False
                request.accepted, request.proposed = (), False
                if done or rng.random() < 0.4:
                    self.requests.remove(request)
        while len(self.requests) < self.slots and rng.random() < 0.5:
            self.requests.append(self._new_request())
        admissions = []
        for request in [r for r in self.requests if r.slot is None]:
            if rng.random() < 0.7:
                admitted = self._admit(request)
                if admitted is not None:
                    admissions.append(admitted)
        runs, self.expect = [], []
        running = [r for r in self.requests if r.slot is not None]
        for i in rng.permutation(len(running)).tolist():
            run = self._run(running[i]) if rng.random() < 0.85 else None
            if run is not None:
                runs.append(run)
        return plan(runs, admit=admissions, release=releases, epoch=self.epoch, step=self.step)

    def take(self, answer: Answer) -> None:
        for expected in self.expect:
            request = expected.request
            chain = answer.chains[request.slot]
            request.tokens += chain
            request.accepted, request.proposed = tuple(chain[:-1]), bool(expected.proposed)
            request.computed += len(chain) - 1
            request.unsent = True

    def _new_request(self) -> Request:
        rng, vocab = self.rng, self.vocab
        like = [r for r in self.requests if r.num_prompt >= self.block_size]
        prompt = rng.integers(0, vocab, int(rng.integers(1, 40))).tolist()
        if like and rng.random() < 0.4:
            other = like[int(rng.integers(len(like)))]
            prompt = other.tokens[: other.num_prompt] + prompt[:3]
        sampling = SamplingState(
            temperature=float(rng.choice([0.0, 0.8, 1.5])),
            top_k=int(rng.choice([0, 0, 3, 20])),
            top_p=float(rng.choice([1.0, 1.0, 0.7])),
            min_p=float(rng.choice([0.0, 0.0, 0.1])),
            presence_penalty=float(rng.choice([0.0, 0.0, 1.0])),
            frequency_penalty=float(rng.choice([0.0, 0.0, 0.5])),
            repetition_penalty=float(rng.choice([1.0, 1.0, 1.3])),
            seed=int(rng.integers(0, 2**64, dtype=np.uint64)),
            choice=int(rng.integers(0, 3)),
            logit_bias={int(rng.integers(vocab)): 4.0} if rng.random() < 0.2 else {},
            bad_words=((int(rng.integers(vocab)),),) if rng.random() < 0.2 else (),
            min_tokens=int(rng.integers(0, 6)),
            stop_token_ids=pack(rng.integers(0, vocab, 3).tolist()),
            logprobs=int(rng.choice([-1, -1, 0, 4])),
        )
        return Request(
            prompt[: self.max_len // 2], min(len(prompt), self.max_len // 2), sampling, grammar=rng.random() < 0.2
        )

    def _admit(self, request: Request) -> Admission | None:
        used_slots = {r.slot for r in self.requests}
        free = [slot for slot in range(self.slots) if slot not in used_slots]
        shared = self._cached_prefix(request)
        computed = len(shared) * self.block_size
        extra = self._take_blocks(-(-len(request.tokens) // self.block_size) - len(shared), shared)
        if not free or extra is None:
            return None
        request.slot = int(self.rng.choice(free))
        request.blocks, request.computed, request.unsent = shared + extra, computed, False
        return admission(
            request.slot,
            request.tokens,
            request.blocks,
            num_prompt=request.num_prompt,
            num_computed=computed,
            sampling=request.sampling,
        )

    def _cached_prefix(self, request: Request) -> list[int]:
        """Whole blocks of a running request that hold the same tokens, at most up to one token before the end."""
        for other in self.requests:
            if other is request or other.slot is None or self.rng.random() < 0.3:
                continue
            size, same = self.block_size, 0
            limit = min(other.computed, len(request.tokens) - 1) // size * size
            while same < limit and other.tokens[same : same + size] == request.tokens[same : same + size]:
                same += size
            if same and other.num_prompt >= same:
                return other.blocks[: same // size]
        return []

    def _take_blocks(self, count: int, besides: list[int]) -> list[int] | None:
        used = {block for r in self.requests if r.slot is not None for block in r.blocks} | set(besides)
        free = [block for block in range(self.blocks) if block not in used]
        if count > len(free):
            return None
        return [int(b) for b in self.rng.choice(free, count, replace=False)] if count > 0 else []

    def _run(self, request: Request) -> Run | None:
        left = len(request.tokens) - request.computed
        count = left if left == 1 or self.rng.random() < 0.5 else int(self.rng.integers(1, left + 1))
        samples = request.computed + count == len(request.tokens)
        masks = [self._mask() for _ in range(4)] if samples and request.grammar else None
        proposed = self._proposed(request, masks) if samples else ()
        end = request.computed + count + len(proposed)
        new = self._take_blocks(max(-(-end // self.block_size) - len(request.blocks), 0), request.blocks)
        if new is None or request.slot is None:
            return None
        last = NO_TOKEN
        if request.unsent:
            told = self.rng.random() < 0.5 or not self.on_device or request.proposed
            last = request.tokens[-1] if told else ON_DEVICE
        accepted, request.accepted = request.accepted, ()
        request.blocks += new
        request.computed += count
        request.unsent = False
        request.steps += 1
        if samples:
            masks = None if masks is None else masks[: len(proposed) + 1]
            self.expect.append(Expected(request, masks, proposed))
        return Run(request.slot, count, last, tuple(new), masks, accepted, proposed)

    def _mask(self) -> np.ndarray:
        allowed: np.ndarray = self.rng.random(self.vocab) < 0.5
        allowed[: self.vocab // 2 : 2] = True  # so that the other rules cannot exclude all that is left
        return allowed

    def _proposed(self, request: Request, masks: list[np.ndarray] | None) -> tuple[int, ...]:
        """Up to three tokens, each right three times in four."""
        room = min(3, self.max_len - 1 - len(request.tokens))
        if self.reference is None or room < 1 or self.rng.random() < 0.3:
            return ()
        tokens = list(request.tokens)
        for place in range(int(self.rng.integers(1, room + 1))):
            mask = None if masks is None else masks[place]
            right = self.reference.token(tokens, request.num_prompt, request.sampling, mask)
            tokens.append(right if self.rng.random() < 0.75 else int(self.rng.integers(self.vocab)))
        return tuple(tokens[len(request.tokens) :])
