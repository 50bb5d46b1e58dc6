"""`phalanx chat`: a conversation in the terminal.

The conversation is kept in memory and sent whole with each message. Ctrl-C while an answer comes ends that answer and
keeps what there is of it; Ctrl-C or Ctrl-D at the prompt ends the chat. When standard input is not a terminal, each of
its lines is a message, so a script can be piped in.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from phalanx.cli.chat_partner import LocalPartner, Partner, RemotePartner
from phalanx.cli.flags import Parser, settings
from phalanx.cli.messages import UsageError, complain
from phalanx.cli.sampling_flags import add_sampling_flags, sampling_options
from phalanx.cli.terminal import Loading, dim, printable
from phalanx.errors import PhalanxError, UserError

_DESCRIPTION = """\
Talk to a model in the terminal. It is loaded into this command, or, with --url, asked on a running server."""

_HELP = """\
/help            this text
/reset           forget the conversation
/system [TEXT]   set the system message and forget the conversation; without TEXT, show it
/retry           answer the last message again
/history         show the conversation
/set NAME VALUE  change a sampling parameter, such as: /set temperature 0.2; /set alone shows them
/save FILE       write the conversation to FILE as JSON
/quit            end the chat (so do Ctrl-D, and Ctrl-C at the prompt)

A line that ends in \\ goes on in the next one. Ctrl-C ends an answer that is coming."""


def run(argv: list[str]) -> int:
    parser = Parser("chat", _DESCRIPTION, positional=True, sections=("model", "cache", "scheduler", "parallel"))
    own = parser.own
    own.add_argument("--url", metavar="URL", help="Talk to this server instead, such as http://127.0.0.1:8000.")
    own.add_argument("--api-key", metavar="KEY", help="Key for the server.")
    own.add_argument("--system", metavar="TEXT", help="System message.")
    add_sampling_flags(parser, max_tokens="what the context leaves")
    chosen = settings(parser, argv)
    options = sampling_options(chosen.args)
    with Loading() as progress:
        partner: Partner
        if chosen.args.url is not None:
            keys = chosen.config.server.api_key
            key = chosen.args.api_key or (keys[0] if keys else None)
            partner = RemotePartner(chosen.args.url, model=chosen.config.model.model, api_key=key)
        else:
            from phalanx.logging import configure

            configure("warning")
            partner = LocalPartner(chosen.config, progress)
    try:
        Chat(partner, chosen.args.system, options).run()
    finally:
        partner.close()
    return 0


class Chat:
    """One conversation with one partner."""

    def __init__(self, partner: Partner, system: str | None, options: dict[str, Any]):
        self._partner = partner
        self._system = system
        self._options = dict(options)
        self._messages: list[dict[str, Any]] = []
        """User and assistant messages; the system message is kept apart."""
        self._terminal = sys.stdin.isatty() and sys.stdout.isatty()
        self._commands: dict[str, Callable[[str], None]] = {
            "help": lambda _: print(_HELP),
            "reset": self._reset,
            "system": self._set_system,
            "retry": self._retry,
            "history": self._show_history,
            "set": self._set,
            "save": self._save,
        }

    def run(self) -> None:
        """Read and answer until the end of input or `/quit`. Raises KeyboardInterrupt at the prompt."""
        if self._terminal:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401 (gives `input` line editing and a history)
            print(f"{self._partner.name}. /help lists the commands, /quit ends the chat.\n")
        while (line := self._read()) is not None:
            name, _, rest = line[1:].partition(" ")
            if not line.startswith("/"):
                self._say(line)
            elif name in ("quit", "exit", "q"):
                return
            elif name in self._commands:
                self._guarded(self._commands[name], rest.strip())
            else:
                complain(UserError(f"There is no command /{name}.", fix="/help lists them."))

    def _read(self) -> str | None:
        """The next message, without its line end; None at the end of input."""
        lines: list[str] = []
        while True:
            prompt = ("... " if lines else "> ") if self._terminal else ""
            try:
                line = input(prompt)
            except EOFError:
                if self._terminal:
                    print()
                return "\n".join(lines) if lines else None
            if line.endswith("\\"):
                lines.append(line[:-1])
                continue
            text = "\n".join([*lines, line]).strip()
            if text:
                return text
            lines = []

    def _guarded(self, command: Callable[[str], None], rest: str) -> None:
        try:
            command(rest)
        except UserError as error:
            complain(error)

    def _say(self, text: str) -> None:
        self._messages.append({"role": "user", "content": text})
        self._answer()

    def _answer(self) -> None:
        """Answer the last message; when that fails, the message is taken back."""
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        text, tokens, finish, first = "", 0, None, 0.0
        begin = time.perf_counter()
        pieces = self._partner.answer(system + self._messages, self._options)
        try:
            for piece in pieces:
                if piece.tokens and not tokens:
                    first = time.perf_counter() - begin
                tokens += piece.tokens
                finish = piece.finish_reason or finish
                text += piece.text
                sys.stdout.write(printable(piece.text) if self._terminal else piece.text)
                sys.stdout.flush()
        except KeyboardInterrupt:
            if not self._terminal:
                raise
            finish = "interrupted"
        except PhalanxError as error:
            print()
            complain(error)
            self._messages.pop()
            return
        finally:
            close = getattr(pieces, "close", None)
            if close is not None:
                close()
        total = time.perf_counter() - begin
        self._messages.append({"role": "assistant", "content": text})
        rate = f", {(tokens - 1) / (total - first):.1f} tok/s" if tokens > 1 and total > first else ""
        ending = {"length": ", cut at the length limit", "interrupted": ", interrupted"}.get(finish or "", "")
        print("" if text.endswith("\n") else "\n", end="")
        print(dim(f"[{tokens} tokens{rate}, first after {first:.2f} s{ending}]", self._terminal))

    def _reset(self, _: str = "") -> None:
        self._messages.clear()
        print("The conversation is forgotten.")

    def _set_system(self, text: str) -> None:
        if not text:
            print(self._system or "There is no system message.")
            return
        self._system = text
        self._reset()

    def _retry(self, _: str) -> None:
        if self._messages and self._messages[-1]["role"] == "assistant":
            self._messages.pop()
        if not self._messages:
            raise UserError("There is no message to answer again.")
        self._answer()

    def _show_history(self, _: str) -> None:
        for message in self._messages:
            print(f"{message['role']}: {printable(message['content'])}")

    def _set(self, text: str) -> None:
        name, _, value = text.replace("=", " ").partition(" ")
        if not name:
            print(", ".join(f"{key} {value}" for key, value in self._options.items()) or "All are the model's own.")
            return
        parser = Parser("chat", "", sections=())
        add_sampling_flags(parser, max_tokens="")
        flag = "--" + name.replace("_", "-")
        if flag not in parser.format_help():
            raise UserError(f"There is no sampling parameter '{name}'.", fix="For example: /set temperature 0.7")
        try:
            given = sampling_options(parser.parse([flag, value.strip()] if value else [flag]))
        except UsageError as error:
            raise UserError(error.message, fix="For example: /set temperature 0.7") from None
        self._options |= given

    def _save(self, name: str) -> None:
        if not name:
            raise UserError("/save needs a file name.")
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        try:
            Path(name).expanduser().write_text(json.dumps(system + self._messages, indent=2, ensure_ascii=False) + "\n")
        except OSError as error:
            raise UserError(f"Cannot write {name}: {error.strerror}.") from None
        print(f"Saved to {name}.")
