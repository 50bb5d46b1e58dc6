"""Flags, `PHALANX_…` variables and YAML files: three ways to set the options that `phalanx.config` declares.

Precedence: flag, then variable, then file, then default. Nothing here knows an option by name; what an option is
called, means and accepts comes from its declaration. A wrong flag, variable, key or value is an error (an unknown
variable only a warning, since others may use the prefix) and suggests the nearest name. Flags and keys of vLLM that we
do not have are known by name (`phalanx.vllm_options`) and answered in a sentence.

Does not cover flags that belong to one command, such as `--max-tokens`: those are added by the command to its `Parser`.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from phalanx import env, fault_point
from phalanx.cli.messages import UsageError, warn
from phalanx.config import EngineConfig, options_by_name
from phalanx.errors import ConfigError
from phalanx.vllm_options import IGNORED, REFUSED, without_ignored

SECTIONS = {
    "model": "model",
    "cache": "KV cache",
    "scheduler": "scheduling",
    "parallel": "parallel layout",
    "recovery": "recovery",
    "limits": "limits of a request",
    "server": "server",
}
"""Sections of the configuration, in the order of the help, with the titles of their groups."""

_OTHER_VARIABLES = ("cache", "debug", "config", "host_ip", "kernels", "fault")
"""`PHALANX_…` variables that are not options: the cache folder, tracebacks, the file that `--config` names, this
machine's address for other nodes, what computes on a CPU, and faults for tests."""

_MAX_FILE_BYTES = 2**20


@dataclasses.dataclass(frozen=True)
class Settings:
    config: EngineConfig
    origins: dict[str, str]
    """Option name to where its value came from: `--port`, `PHALANX_PORT`, the file's path, or `default`."""
    args: argparse.Namespace
    """The command's own flags."""


class Parser(argparse.ArgumentParser):
    """An argument parser with the engine's options. `sections` are those that become flags; `positional` makes MODEL an
    argument. Errors are raised as `UsageError`, never printed."""

    def __init__(
        self,
        command: str,
        description: str,
        *,
        usage: str = "",
        positional: bool = False,
        sections: Iterable[str] = tuple(SECTIONS),
    ):
        super().__init__(
            prog=f"phalanx {command}",
            usage=f"phalanx {command} {usage or ('[MODEL] ' if positional else '')}[flags]",
            description=description,
            formatter_class=_Formatter,
            allow_abbrev=False,
            add_help=False,
        )
        self.sections = tuple(sections)
        self.own = self.add_argument_group("flags of this command")
        self.own.add_argument("-h", "--help", action="help", help="Show this text and exit.")
        self.own.add_argument("--debug", action="store_true", help="Show tracebacks of errors.")
        if self.sections:
            self.own.add_argument("--config", metavar="FILE", help="YAML file with options, one `name: value` a line.")
        self._add_options(positional)

    def error(self, message: str) -> NoReturn:
        text = message[:1].upper() + message[1:]
        raise UsageError(f"{text.rstrip('.')}.", fix=f"'{self.prog} --help' lists the flags.")

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parsed arguments; options that were not given are absent. Raises UsageError."""
        words = _dashes(argv)
        args, unknown = self.parse_known_args(words)
        if unknown:
            self._refuse(unknown[0])
        model = getattr(args, "positional_model", None)
        if model is not None and not os.path.exists(model):
            self._refuse_a_second_value(words, model)
        return args

    def _refuse_a_second_value(self, words: Sequence[str], model: str) -> None:
        """vLLM takes `--served-model-name a b` for two names; here `b` would be the model (a key: asked for at the
        hub)."""
        for flag, _, word in zip(words, words[1:], words[2:], strict=False):
            if word == model and isinstance(self._option_string_actions.get(flag), argparse._AppendAction):
                raise UsageError(
                    f"The word after the value of {flag} may be the model or another value.",
                    fix=f"Write the model first, and {flag} again before each further value.",
                )

    def _refuse(self, argument: str) -> NoReturn:
        flag = argument.partition("=")[0]
        if flag in REFUSED:
            raise UsageError(f"{flag} is not in this version: {REFUSED[flag]}")
        if not flag.startswith("-"):
            fix = f"'{self.prog} --help' shows the usage. A flag that takes several values is repeated for each."
            raise UsageError(f"Unexpected argument '{argument}'.", fix=fix)
        if flag[1:] in self._option_string_actions:  # `--tp` for `-tp`
            raise UsageError(f"Unknown flag {flag}.", fix=f"Did you mean {flag[1:]}?")
        glued = re.fullmatch(r"(-[a-z]+)(\d.*)", flag)  # `-tp2` for `-tp 2`
        if glued and glued[1] in self._option_string_actions:
            raise UsageError(f"Unknown flag {flag}.", fix=f"Did you mean {glued[1]} {glued[2]}?")
        close = difflib.get_close_matches(flag, self._visible_flags(), 1, cutoff=0.6)
        fix = f"Did you mean {close[0]}?" if close else f"'{self.prog} --help' lists the flags."
        raise UsageError(f"Unknown flag {flag}.", fix=fix)

    def _visible_flags(self) -> list[str]:
        return [
            flag
            for action in self._actions
            if action.help != argparse.SUPPRESS
            for flag in action.option_strings
            if flag.startswith("--")
        ]

    def _add_options(self, positional: bool) -> None:
        groups = {name: self.add_argument_group(SECTIONS[name]) for name in self.sections}
        for name, (section, declared) in options_by_name().items():
            if section not in groups:
                continue
            group = groups[section]
            about = dict(declared.metadata)
            if about["positional"] and positional:
                group.add_argument(
                    "positional_" + name, nargs="?", metavar=name.upper(), default=None, help=about["help"]
                )
                about["help"] = "The same as MODEL."
            flags = [*about["flags"], _flag(name)]
            shown = about["help"].replace("%", "%%") + _default_text(declared)
            if declared.type == "bool":
                group.add_argument(*flags, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=shown)
            elif str(declared.type).startswith("tuple"):
                group.add_argument(
                    *flags, action="append", metavar=_metavar(declared), default=argparse.SUPPRESS, help=shown
                )
            else:
                group.add_argument(*flags, metavar=_metavar(declared), default=argparse.SUPPRESS, help=shown)
        if self.sections:
            for flag, (takes_value, reason) in IGNORED.items():
                self.add_argument(
                    flag, action=_Ignored, nargs="?" if takes_value else 0, const=reason, help=argparse.SUPPRESS
                )


class _Ignored(argparse.Action):
    """A flag of vLLM that needs nothing here: says so once and goes on."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        warn(f"{option_string} is ignored: {self.const}")


class _Formatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=110)


def _dashes(argv: Sequence[str]) -> list[str]:
    """`--max_model_len=4` as `--max-model-len=4`; nothing after `--` is touched."""
    out: list[str] = []
    for position, argument in enumerate(argv):
        if argument == "--":
            return [*out, *argv[position:]]
        name, equals, value = argument.partition("=")
        out.append(name.replace("_", "-") + equals + value if name.startswith("--") else argument)
    return out


def _metavar(declared: dataclasses.Field[Any]) -> str:
    if declared.metadata["metavar"]:
        return str(declared.metadata["metavar"])
    if declared.metadata["choices"]:
        return "{" + ",".join(declared.metadata["choices"]) + "}"
    if declared.metadata["parse"] is not None:
        return "SIZE"
    return {"int": "N", "float": "X"}.get(str(declared.type).removesuffix(" | None"), "TEXT")


def _default_text(declared: dataclasses.Field[Any]) -> str:
    default = declared.default
    if default is None or default == () or default is dataclasses.MISSING:
        return ""
    shown = {True: "on", False: "off"}[default] if isinstance(default, bool) else default
    return f" [{shown}]"


def _given_twice(document: Any) -> str | None:
    """The first key that a YAML mapping has twice; the library would silently take the last."""
    seen = set()
    for key, _ in document.value if getattr(document, "id", "") == "mapping" else ():
        if str(key.value) in seen:
            return str(key.value)
        seen.add(str(key.value))
    return None


def from_file(path: str) -> dict[str, Any]:
    """The options of a YAML file, by option name. Raises ConfigError that names the file."""
    import yaml

    try:
        with Path(path).expanduser().open("rb") as file:
            raw = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"Cannot read the configuration file {path}: {error.strerror}.") from None
    if len(raw) > _MAX_FILE_BYTES:
        raise ConfigError(f"{path} is larger than 1 MiB, too large for a configuration file.")
    try:
        content = yaml.safe_load(raw)
        twice = _given_twice(yaml.compose(raw, Loader=yaml.SafeLoader))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(
            f"{path}{where} is not valid YAML: {getattr(error, 'problem', None) or 'unreadable'}."
        ) from None
    except (RecursionError, ValueError):
        raise ConfigError(f"{path} is not valid YAML.") from None
    if twice is not None:
        raise ConfigError(f"{path}: '{twice}' is given twice.")
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold options as `name: value` lines.")
    try:
        content = without_ignored(content, lambda text: warn(f"{path}: {text}"))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}") from None
    known = options_by_name()
    options: dict[str, Any] = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            fix = (
                f"Did you mean '{close[0].replace('_', '-')}'?"
                if close
                else "'phalanx serve --help' lists the options."
            )
            raise ConfigError(f"{path}: unknown option '{key}'.", fix=fix)
        if isinstance(value, dict) and known[name][1].metadata["metavar"] != "JSON":
            raise ConfigError(f"{path}: '{key}' holds a mapping, but takes a value.")
        if name in options:
            raise ConfigError(f"{path}: '{key}' is given twice.")
        options[name] = _checked(name, value, f"{path}: {key}")
    return options


def from_variables(variables: Mapping[str, str]) -> dict[str, Any]:
    """The options in `PHALANX_…` variables (given as `phalanx.env.variables` does). Several values are separated by
    commas. Warns of names that are no option. Raises ConfigError naming the variable."""
    fault_point.parse(variables.get("fault", ""))  # the engine process would end with it
    known = options_by_name()
    options: dict[str, Any] = {}
    for name, text in sorted(variables.items()):
        shown = env.PREFIX + name.upper()
        if name in known:
            value: Any = text
            if str(known[name][1].type).startswith("tuple"):
                value = tuple(item.strip() for item in text.split(",") if item.strip())
            options[name] = _checked(name, value, shown)
        elif name not in _OTHER_VARIABLES:
            close = difflib.get_close_matches(name, [*known, *_OTHER_VARIABLES], 1)
            hint = f" Did you mean {env.PREFIX}{close[0].upper()}?" if close else ""
            warn(f"{shown} is not an option and has no effect.{hint}")
    return options


def _checked(name: str, value: Any, origin: str) -> Any:
    """`value` as the option's type. Raises ConfigError that begins with `origin`, in place of the option's name."""
    try:
        config = EngineConfig.from_options(**{name: value})
    except ConfigError as error:
        own = next((own for own in (f"`{name}`", _flag(name)) if error.message.startswith(own)), None)
        told = f"{origin}: {error.message}" if own is None else origin + error.message.removeprefix(own)
        raise ConfigError(told, fix=error.fix) from None
    return getattr(getattr(config, options_by_name()[name][0]), name)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def settings(
    parser: Parser,
    argv: Sequence[str],
    variables: Mapping[str, str] | None = None,
    *,
    file_argument: str = "config",
) -> Settings:
    """Read a command line and everything below it. `variables` are as `phalanx.env.variables` gives them (the default).
    `file_argument` names an argument that holds the file, in place of `--config`. Raises UsageError for a wrong flag,
    ConfigError for the rest."""
    args = parser.parse(argv)
    variables = env.variables() if variables is None else variables
    known = options_by_name()
    options: dict[str, Any] = {}
    origins = dict.fromkeys(known, "default")

    file = getattr(args, file_argument, None) or getattr(args, "config", None) or variables.get("config")
    if file:
        options |= from_file(file)
        origins |= dict.fromkeys(options, file)
    from_environment = from_variables(variables)
    options |= from_environment
    origins |= {name: env.PREFIX + name.upper() for name in from_environment}

    for name, (section, declared) in known.items():
        if section not in parser.sections:
            continue
        flag = _flag(name)
        given = getattr(args, name, None)
        if declared.metadata["positional"]:
            bare = getattr(args, "positional_" + name, None)
            if bare is not None and given is not None and bare != given:
                raise UsageError(f"The {name} is given twice: '{bare}' and {flag} '{given}'.", fix="Leave one out.")
            given = bare if bare is not None else given
        if given is None:
            continue
        try:
            options[name] = _checked(name, tuple(given) if isinstance(given, list) else given, flag)
        except ConfigError as error:
            raise UsageError(error.message, fix=error.fix) from None
        origins[name] = flag
    return Settings(EngineConfig.from_options(**options), origins, args)
