"""Log-probabilities in the three shapes that clients know: chat, completions, and prompt log-probabilities."""

from __future__ import annotations

from phalanx.outputs import Logprob, PositionLogprobs
from phalanx.server.openai_types import (
    ChatLogprobs,
    ChatTokenLogprob,
    ChatTopLogprob,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobsList,
    lowest,
)


def chat_logprobs(positions: list[PositionLogprobs]) -> ChatLogprobs:
    return ChatLogprobs([_chat_token(position) for position in positions])


def _chat_token(position: PositionLogprobs) -> ChatTokenLogprob:
    chosen = position.chosen
    top = [ChatTopLogprob(entry.text, lowest(entry.logprob), list(entry.data)) for entry in position.top]
    return ChatTokenLogprob(chosen.text, lowest(chosen.logprob), list(chosen.data), top)


class CompletionLogprobsWriter:
    """Goes along one answer and knows where in its text each token begins."""

    def __init__(self, count: int):
        """`count`: alternatives asked for at each position."""
        self._count = count
        self._offset = 0

    def write(self, positions: list[PositionLogprobs]) -> CompletionLogprobs:
        written = CompletionLogprobs([], [], [], [])
        self._append(written, positions)
        return written

    def write_echo(
        self, prompt: list[PositionLogprobs | None], first_token: str, positions: list[PositionLogprobs]
    ) -> CompletionLogprobs:
        """The prompt's tokens, the first of which has no probability, and then `positions`."""
        written = CompletionLogprobs([first_token], [None], [None], [self._offset])
        self._offset += len(first_token)
        self._append(written, [position for position in prompt if position is not None])
        self._append(written, positions)
        return written

    def _append(self, written: CompletionLogprobs, positions: list[PositionLogprobs]) -> None:
        for position in positions:
            chosen = position.chosen
            written.tokens.append(chosen.text)
            written.token_logprobs.append(lowest(chosen.logprob))
            entries = (*position.top[: self._count], chosen)  # OpenAI lists the chosen token beside the best ones
            written.top_logprobs.append({entry.text: lowest(entry.logprob) for entry in entries})
            written.text_offset.append(self._offset)
            self._offset += len(chosen.text)


def prompt_logprobs(positions: list[PositionLogprobs | None]) -> PromptLogprobsList:
    return [None if position is None else _alternatives(position) for position in positions]


def _alternatives(position: PositionLogprobs) -> dict[str, PromptLogprob]:
    entries: list[Logprob] = [position.chosen, *position.top]
    return {str(entry.token_id): PromptLogprob(lowest(entry.logprob), entry.rank, entry.text) for entry in entries}
