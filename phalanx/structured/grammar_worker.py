"""The process that tries grammars before an engine gets them: a hostile one may crash it, fill it or keep it busy.

The first frame is {tokenizer, width, eos}; each further one {kind, text}, answered by {error} with an empty reason when
the grammar compiles and has a first token. The work is done on a small stack: what fits there fits anywhere.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import llguidance

from phalanx.killable import serve
from phalanx.structured.translate import parser_limits, reason, translate

_STACK = 1 << 20


class Trial:
    """Holds the vocabulary, which the first call brings; each further call is one job."""

    def __init__(self) -> None:
        self._vocabulary: llguidance.LLTokenizer | None = None

    def __call__(self, request: dict[str, Any]) -> dict[str, Any]:
        vocabulary = self._vocabulary
        if vocabulary is None:
            self._vocabulary = llguidance.LLTokenizer(
                request["tokenizer"], n_vocab=request["width"], eos_token=request["eos"]
            )
            return {}
        answer = {"error": "it needs too much memory"}

        def job() -> None:
            answer["error"] = why_not(vocabulary, request["kind"], request["text"])

        thread = threading.Thread(target=job)
        thread.start()
        thread.join()
        return answer


def why_not(vocabulary: llguidance.LLTokenizer, kind: str, text: str) -> str:
    """Why the grammar cannot be used; empty when it can."""
    try:
        grammar = translate(kind, text)
    except ValueError as error:
        return reason(str(error)) or "it is not valid"
    matcher = llguidance.LLMatcher(vocabulary, grammar, log_level=0, limits=parser_limits())
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        return reason(matcher.get_error()) or "it is not valid"
    return "" if not matcher.is_stopped() or matcher.is_accepting() else "nothing matches it"


def main(memory_bytes: int) -> None:
    threading.stack_size(_STACK)
    serve(Trial(), memory_bytes)


if __name__ == "__main__":
    main(int(sys.argv[1]))
