"""`phalanx generate`: one prompt in, one answer out, on the terminal, in a pipe, or as JSON.

A model with a chat template gets the prompt as a user's message, because that is what such a model was trained on and
what people expect of a question on the command line; `--raw` gives it the text as it is. A model without a template
always gets the text as it is.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.cli.flags import Parser, settings
from phalanx.cli.messages import UsageError
from phalanx.cli.sampling_flags import add_sampling_flags, sampling_options
from phalanx.cli.terminal import Loading, dim, printable
from phalanx.config import EngineConfig
from phalanx.errors import InvalidRequest, UserError

if TYPE_CHECKING:
    from phalanx.engine.async_engine import AsyncEngine

_SECTIONS = ("model", "cache", "scheduler", "parallel")
_DESCRIPTION = """\
Answer one prompt and exit. PROMPT is the text; without it, the text of --file or of standard input. A model with a
chat template is asked as in a chat (--raw gives it the text as it is)."""


@dataclass
class _Answer:
    prompt_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    first_s: float = 0.0
    total_s: float = 0.0

    @property
    def decode_tok_s(self) -> float | None:
        span = self.total_s - self.first_s
        return (len(self.token_ids) - 1) / span if len(self.token_ids) > 1 and span > 0 else None


def run(argv: list[str]) -> int:
    parser = Parser("generate", _DESCRIPTION, usage="[PROMPT] ", sections=_SECTIONS)
    own = parser.own
    own.add_argument("prompt", nargs="?", metavar="PROMPT", help="The prompt; - is standard input.")
    own.add_argument("-f", "--file", metavar="FILE", help="Read the prompt from this file; - is standard input.")
    form = own.add_mutually_exclusive_group()
    form.add_argument("--chat", action="store_true", help="Ask as in a chat, or fail if the model has no template.")
    form.add_argument("--raw", action="store_true", help="Give the model the text as it is.")
    own.add_argument("--system", metavar="TEXT", help="System message of the chat.")
    own.add_argument("--json", action="store_true", help="Print one JSON object at the end.")
    own.add_argument("--stats", action="store_true", help="Print tokens and speed to standard error.")
    add_sampling_flags(parser, max_tokens="what the context leaves")
    chosen = settings(parser, argv)
    if chosen.args.raw and chosen.args.system is not None:
        raise UsageError("--system needs a chat, and --raw is none.", fix="Leave one out.")
    options = sampling_options(chosen.args)
    prompt = _prompt(chosen.args)
    answer = asyncio.run(_generate(chosen.config, chosen.args, prompt, options))
    return 0 if answer.finish_reason in ("stop", "length") else 1


def _prompt(args: argparse.Namespace) -> str:
    """The prompt's text. Raises UsageError, UserError."""
    if args.prompt is not None and args.file is not None:
        raise UsageError("The prompt is given twice, as an argument and as --file.", fix="Leave one out.")
    source = args.file if args.file is not None else args.prompt
    if args.file is None and args.prompt not in (None, "-"):
        return str(args.prompt)
    if source in (None, "-"):
        if source is None and sys.stdin.isatty():
            raise UsageError("There is no prompt.", fix='Write one: phalanx generate "Why is the sky blue?"')
        data, name = sys.stdin.buffer.read(), "Standard input"
    else:
        try:
            data, name = Path(source).read_bytes(), source
        except OSError as error:
            raise UserError(f"Cannot read {source}: {error.strerror}.") from None
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise UserError(f"{name} is not UTF-8 text.") from None
    text = text.removesuffix("\n")
    if not text:
        raise UserError(f"{name} is empty.", fix="Give a prompt.")
    return text


async def _generate(config: EngineConfig, args: argparse.Namespace, prompt: str, options: dict[str, Any]) -> _Answer:
    from phalanx.engine.async_engine import AsyncEngine
    from phalanx.logging import configure

    configure("warning")
    engine = AsyncEngine(config)
    try:
        with Loading() as progress:
            info = await engine.start(progress)
        # Without a limit a base model would go on to the end of its context, so None is right only for chats; but a
        # limit that cuts an answer short without being asked for surprises more, and Ctrl-C ends it.
        params = engine.default_sampling(**{"max_tokens": None, **options})
        chat = args.chat or (engine.chat_template is not None and not args.raw)
        if args.system is not None and not chat:
            raise InvalidRequest("This model has no chat template, so --system has no place.", fix="Leave it out.")
        text = await _render(engine, prompt, args.system) if chat else prompt
        answer = _Answer()
        begin = time.perf_counter()
        async for delta in engine.generate(text, params, add_special_tokens=not chat):
            output = delta.outputs[0]
            answer.prompt_tokens = len(delta.prompt_token_ids)
            if output.token_ids and not answer.token_ids:
                answer.first_s = time.perf_counter() - begin
            answer.token_ids += output.token_ids
            answer.text += output.text
            answer.finish_reason = output.finish_reason or answer.finish_reason
            if not args.json:
                sys.stdout.write(printable(output.text) if sys.stdout.isatty() else output.text)
                sys.stdout.flush()
        answer.total_s = time.perf_counter() - begin
    finally:
        await engine.close()
    _finish(args, answer, prompt, info.model)
    return answer


async def _render(engine: AsyncEngine, prompt: str, system: str | None) -> str:
    messages = [{"role": "user", "content": prompt}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return await engine.apply_chat_template(messages)


def _finish(args: argparse.Namespace, answer: _Answer, prompt: str, model: str) -> None:
    rate = answer.decode_tok_s
    if args.json:
        shown = {
            "model": model,
            "prompt": prompt,
            "text": answer.text,
            "token_ids": answer.token_ids,
            "finish_reason": answer.finish_reason,
            "usage": {
                "prompt_tokens": answer.prompt_tokens,
                "completion_tokens": len(answer.token_ids),
                "total_tokens": answer.prompt_tokens + len(answer.token_ids),
            },
            "ttft_s": round(answer.first_s, 4),
            "decode_tok_s": round(rate, 2) if rate else None,
        }
        print(json.dumps(shown, ensure_ascii=False))
    elif not answer.text.endswith("\n"):
        print()
    if args.stats:
        speed = f", {rate:.1f} tok/s" if rate else ""
        line = f"{len(answer.token_ids)} tokens{speed}, first after {answer.first_s:.2f} s, {answer.finish_reason}"
        print(dim(line, sys.stderr.isatty()), file=sys.stderr)
