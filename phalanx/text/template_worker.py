"""The process that renders chat templates.

A template comes with a model, so it is somebody else's program. It runs in jinja2's immutable sandbox, in a process of
its own (`phalanx.killable`) that holds no secrets. The module imports nothing that is not needed, to start quickly.

A request is {template, variables, limit}, an answer {text} or {error, kind} with kind template (it refused or failed),
syntax, security or size.
"""

from __future__ import annotations

import json
import sys
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from phalanx.killable import serve

_CACHED = 64


class TooLong(Exception):
    pass


class GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks what a model has said, for training. Rendering only sees the body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """What the templates of Hugging Face expect: trimmed blocks, loop controls, and a few functions."""

    # Interception also keeps the compiler from computing constant expressions such as "x" * 10**9.
    intercepted_binops = frozenset(["**", "*", "+", "%"])

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, "jinja2.ext.loopcontrols"])
        self.filters["tojson"] = to_json
        self.globals["raise_exception"] = raise_exception
        self.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
        for name in ("lipsum", "cycler", "joiner"):
            self.globals.pop(name, None)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own filter escapes HTML, which prompts must not have."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def render(template: jinja2.Template, variables: dict[str, Any], limit: int) -> str:
    """Raises TooLong as soon as the text has more than `limit` characters."""
    pieces: list[str] = []
    length = 0
    for piece in template.generate(**variables):
        length += len(piece)
        if length > limit:
            raise TooLong
        pieces.append(piece)
    return "".join(pieces)


def answer(environment: Sandbox, templates: dict[str, jinja2.Template], request: dict[str, Any]) -> dict[str, str]:
    source = request["template"]
    try:
        template = templates.get(source)
        if template is None:
            if len(templates) >= _CACHED:
                templates.clear()
            template = templates[source] = environment.from_string(source)
        return {"text": render(template, request["variables"], request["limit"])}
    except TooLong:
        return {"kind": "size", "error": ""}
    except jinja2.exceptions.SecurityError as error:
        return {"kind": "security", "error": str(error)}
    except jinja2.TemplateSyntaxError as error:
        return {"kind": "syntax", "error": f"line {error.lineno}: {error.message}"}
    except jinja2.TemplateError as error:
        return {"kind": "template", "error": str(error.message)}
    except MemoryError:
        return {"kind": "size", "error": ""}
    except Exception as error:
        return {"kind": "template", "error": f"{type(error).__name__}: {error}"}


def main(memory_bytes: int) -> None:
    environment, templates = Sandbox(), dict[str, jinja2.Template]()
    serve(lambda request: answer(environment, templates, request) if request else {}, memory_bytes)


if __name__ == "__main__":
    main(int(sys.argv[1]))
