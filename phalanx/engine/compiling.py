"""Requests whose grammar is being compiled, in a few threads, so that the step loop never waits for one.

Replays the tokens that a resumed request has already delivered, so that a grammar comes out ready for the next one.
How long a compilation may take and how large a grammar may be is the compiler's business.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from phalanx.engine.request import Grammar, Request
from phalanx.errors import InvalidRequest, PhalanxError
from phalanx.sampling_params import StructuredOutputs

_log = logging.getLogger(__name__)


class Compilations:
    """Threads start with the first request that needs one."""

    def __init__(self, compile_grammar: Callable[[StructuredOutputs], Grammar] | None) -> None:
        self._compile_grammar = compile_grammar
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="grammar")
        self._pending: dict[str, tuple[Request, Future[Grammar]]] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._pending

    def start(self, request: Request, structured: StructuredOutputs) -> None:
        """Raises InvalidRequest when there is no compiler."""
        if self._compile_grammar is None:
            raise InvalidRequest("This engine has no structured output.", param="structured_outputs")
        delivered = request.given.output_token_ids
        future = self._threads.submit(_compile, self._compile_grammar, structured, delivered)
        self._pending[request.request_id] = (request, future)

    def cancel(self, request_id: str) -> Request:
        """Raises KeyError when it is not being compiled. A compilation that has begun ends unheard."""
        request, future = self._pending.pop(request_id)
        future.cancel()
        return request

    def cancel_all(self) -> list[Request]:
        return [self.cancel(request_id) for request_id in tuple(self._pending)]

    def take_done(self, wait_s: float = 0.0) -> list[tuple[Request, Exception | None]]:
        """The requests whose compilation has ended, their grammar in place, or with the reason why it could not be
        compiled. Waits up to `wait_s` seconds for a first one."""
        if not self._pending:
            return []
        wait([future for _, future in self._pending.values()], wait_s, FIRST_COMPLETED)
        done = [entry for entry in self._pending.values() if entry[1].done()]
        ended: list[tuple[Request, Exception | None]] = []
        for request, future in done:
            del self._pending[request.request_id]
            try:
                request.grammar = future.result()
            except Exception as error:
                ended.append((request, _as_user_error(error, request)))
            else:
                ended.append((request, None))
        return ended

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def _compile(
    compile_grammar: Callable[[StructuredOutputs], Grammar], structured: StructuredOutputs, delivered: tuple[int, ...]
) -> Grammar:
    grammar = compile_grammar(structured)
    for token in delivered:
        if not grammar.accept(token):
            raise InvalidRequest("The tokens delivered so far do not follow `structured_outputs`.")
    return grammar


def _as_user_error(error: Exception, request: Request) -> PhalanxError:
    if isinstance(error, PhalanxError):
        return error
    _log.error("the grammar of request %r could not be compiled", request.request_id, exc_info=error)
    return InvalidRequest(
        f"`structured_outputs` could not be compiled ({type(error).__name__}).",
        fix="Simplify the schema, regex or grammar.",
        param="structured_outputs",
    )
