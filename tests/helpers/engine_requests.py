"""Engine requests and outputs by hand, for tests of what stands around an engine."""

from phalanx.engine.client import EngineOutput, EngineRequest
from phalanx.sampling_params import SamplingParams


def engine_request(request_id: str = "r#0", prompt=(1, 2, 3), *, choice: int = 0, eos=(), **params) -> EngineRequest:
    sampling = SamplingParams(**{"max_tokens": 8, "seed": 0, **params})
    return EngineRequest(request_id, list(prompt), sampling, choice=choice, eos_token_ids=tuple(eos))


async def collect(stream, found: list[EngineOutput] | None = None) -> list[EngineOutput]:
    """All outputs; `found` has at any moment those that have come."""
    found = [] if found is None else found
    async for output in stream:
        found.append(output)
    return found


async def collect_until(kind: type[Exception], stream) -> list[EngineOutput]:
    """What comes before the stream raises `kind`, as it must."""
    outputs: list[EngineOutput] = []
    try:
        async for output in stream:
            outputs.append(output)
    except kind:
        return outputs
    raise AssertionError(f"the stream ended without {kind.__name__}")


def tokens_of(outputs: list[EngineOutput]) -> list[int]:
    """All tokens, checked to be without gap or repeat."""
    tokens: list[int] = []
    for output in outputs:
        assert output.start == len(tokens)
        tokens += output.token_ids
    return tokens
