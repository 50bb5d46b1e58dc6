"""`phalanx config check` and `config show`: what flags, variables and a file add up to; nothing is started."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from phalanx.cli.flags import SECTIONS, Parser, Settings, settings
from phalanx.cli.messages import UsageError
from phalanx.cli.redact import HIDDEN
from phalanx.config import options_by_name, resolve
from phalanx.planner.hardware import detect
from phalanx.server.listening import check

_OVERVIEW = """\
usage: phalanx config {check,show} [FILE] [flags]

  check    read FILE, the PHALANX_… variables and the flags, and say whether 'phalanx serve' would take them
  show     print every option's value; --origin says where each came from

FILE is a YAML file, as for --config. Every flag of 'phalanx serve' is understood."""


@dataclass(frozen=True)
class _AnyModel:
    """Stands for the model that a configuration will meet, where none is loaded: no limit of its own."""

    max_positions: int = 2**62
    checkpoint_dtype: str = "bfloat16"


def run(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(_OVERVIEW)
        return 0 if argv else 2
    action, rest = argv[0], argv[1:]
    if action not in ("check", "show"):
        raise UsageError(f"Unknown action '{action}'.", fix="Use 'phalanx config check' or 'phalanx config show'.")
    parser = Parser(f"config {action}", "Read a configuration without starting anything.", usage="[FILE] ")
    parser.own.add_argument("file", nargs="?", metavar="FILE", help="YAML file, as --config.")
    if action == "show":
        parser.own.add_argument("--origin", action="store_true", help="Say where each value came from.")
        parser.own.add_argument("--changed", action="store_true", help="Leave out options at their defaults.")
        parser.own.add_argument("--json", action="store_true", help="Print JSON.")
    chosen = settings(parser, rest, file_argument="file")
    # Finds what no model and no other machine would mend, such as a parallel layout that this version does not have.
    resolve(chosen.config, _AnyModel(), detect())
    check(chosen.config.server)
    if action == "check":
        changed = sum(origin != "default" for origin in chosen.origins.values())
        print(f"ok: {changed} option{'' if changed == 1 else 's'} set, the rest at their defaults")
        return 0
    _show(chosen)
    return 0


def _show(chosen: Settings) -> None:
    values = {
        name: HIDDEN if declared.metadata["secret"] and value else value
        for name, (section, declared) in options_by_name().items()
        for value in [getattr(getattr(chosen.config, section), name)]
        if not (chosen.args.changed and chosen.origins[name] == "default")
    }
    if chosen.args.json:
        shown = {n: {"value": v, "origin": chosen.origins[n]} if chosen.args.origin else v for n, v in values.items()}
        print(json.dumps(shown, indent=2))
        return
    sections = {name: section for name, (section, _) in options_by_name().items()}
    for section, title in SECTIONS.items():
        lines = [_line(name, value, chosen) for name, value in values.items() if sections[name] == section]
        if lines:
            print(f"# {title}", *lines, "", sep="\n")


def _line(name: str, value: Any, chosen: Settings) -> str:
    line = f"{name.replace('_', '-')}: {_yaml(value)}"
    return f"{line:<44}  # {chosen.origins[name]}" if chosen.args.origin else line


def _yaml(value: Any) -> str:
    """A value as JSON, which is YAML too."""
    return json.dumps(list(value) if isinstance(value, tuple) else value)
