"""The `phalanx` command: finds the sub-command's function, calls it, and turns errors into one line and an exit code.

A command is imported only when it is called, so that `phalanx --help` answers at once and imports no torch. Exit codes:
0 done, 1 an error (a value that is out of range, too), 2 a command line that cannot be understood, 130 ended by Ctrl-C.
"""

from __future__ import annotations

import difflib
import io
import os
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple

import phalanx
from phalanx import env
from phalanx.cli.messages import UsageError, complain
from phalanx.errors import PhalanxError, UserError


class Command(NamedTuple):
    target: str
    """`module:function`; the function takes the arguments after the command's name and returns an exit code."""
    help: str


COMMANDS = {
    "serve": Command("phalanx.cli.serve:run", "Start the OpenAI-compatible server."),
    "generate": Command("phalanx.cli.generate:run", "Answer one prompt and exit."),
    "chat": Command("phalanx.cli.chat:run", "Talk to a model in the terminal."),
    "bench": Command("phalanx.cli.bench:run", "Measure latency, throughput, or the exchange between ranks."),
    "plan": Command("phalanx.cli.plan:run", "Say how a model would be laid out over devices, and whether it fits."),
    "doctor": Command("phalanx.cli.doctor:run", "Check this machine and say what to mend."),
    "collect-env": Command("phalanx.cli.collect_env:run", "Print versions and hardware for a bug report."),
    "config": Command("phalanx.cli.config_command:run", "Check or show the effective configuration."),
}

_NOT_YET = frozenset({"cluster", "status", "top", "run-batch"})


def main(argv: list[str] | None = None) -> int:
    """Run `phalanx` with these arguments (default: the process's own) and return the exit code."""
    _open_streams()
    arguments = list(sys.argv[1:]) if argv is None else list(argv)
    debug = env.debug() or "--debug" in arguments
    try:
        code = _dispatch(arguments)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output went away (`phalanx … | head`). Python would complain again while it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except PhalanxError as error:
        if debug:
            traceback.print_exc()
        complain(error)
        return 2 if isinstance(error, UsageError) else 1
    except OSError as error:
        if debug:
            traceback.print_exc()
        about = f"{error.filename}: " if error.filename else ""
        complain(UserError(f"{about}{error.strerror or error}."))
        return 1


def _open_streams() -> None:
    """Have somewhere to write to: a closed stream is like the null device, and a character that the terminal's encoding
    does not have is shown as `?` or by its number instead of ending the answer."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:  # a socket must not get the number of a standard stream
        os.set_inheritable(number, True)
    os.close(number)
    for name, errors in (("stdout", "replace"), ("stderr", "backslashreplace")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 (open as long as the process)
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        if len(arguments) > 1 and arguments[1] in COMMANDS:
            return _load(arguments[1])(["--help"])
        print(overview())
        return 0 if arguments else 2
    name, rest = arguments[0], arguments[1:]
    if name in ("-V", "--version", "version"):
        print(f"phalanx {phalanx.__version__}")
        return 0
    if name == "--debug":
        return _dispatch(rest)
    return _load(name.replace("_", "-"))(rest)


def _load(name: str) -> Callable[[list[str]], int]:
    if name in _NOT_YET:
        raise UsageError(f"'phalanx {name}' is not in this version.", fix="'phalanx --help' lists what is.")
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, 1)
        fix = f"Did you mean 'phalanx {close[0]}'?" if close else "'phalanx --help' lists the commands."
        what = "flag" if name.startswith("-") else "command"
        raise UsageError(f"Unknown {what} '{name}'.", fix=fix)
    module, _, function = COMMANDS[name].target.partition(":")
    loaded: Callable[[list[str]], int] = getattr(import_module(module), function)
    return loaded


def overview() -> str:
    """The text of `phalanx --help`."""
    lines = [
        "usage: phalanx COMMAND [flags]",
        "",
        "Serve large language models on your own machine. Without a model, a small demo model is fetched and used.",
        "",
        "commands:",
        *(f"  {name:<12} {command.help}" for name, command in COMMANDS.items()),
        "",
        "examples:",
        "  phalanx serve                                  the demo model on http://127.0.0.1:8000",
        "  phalanx serve ./model-folder --port 9000       a folder, a .gguf file or a Hugging Face id",
        '  phalanx generate "What is the capital of Japan?"',
        "  phalanx chat",
        "",
        "'phalanx COMMAND --help' lists a command's flags. --version prints the version, --debug shows tracebacks.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
