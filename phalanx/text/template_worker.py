"""The process that renders chat templates: reads requests from standard input, writes answers to standard output.

A template comes with a model, so it is somebody else's program. It runs in jinja2's immutable sandbox, in a process of
its own that holds no secrets, has little memory and is killed when it takes too long. The script imports nothing of
Phalanx, so that it starts quickly and knows nothing.

A message is a 4-byte big-endian length and that much JSON. A request is {template, variables, limit}, an answer
{"text"} or {"error", "kind"} with kind template (the template refused or failed), syntax, security or size.
"""

from __future__ import annotations

import json
import signal
import sys
from datetime import datetime
from typing import Any, BinaryIO, NoReturn

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

ALARM_S = 30
"""A render that outlives its reader ends after this long, inside C code too."""
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


def read_exactly(stream: BinaryIO, count: int) -> bytes | None:
    data = stream.read(count)
    return data if len(data) == count else None


def main(memory_bytes: int) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    source, target = sys.stdin.buffer, sys.stdout.buffer
    environment, templates = Sandbox(), dict[str, jinja2.Template]()
    while (head := read_exactly(source, 4)) and (body := read_exactly(source, int.from_bytes(head, "big"))):
        signal.alarm(ALARM_S)
        reply = json.dumps(answer(environment, templates, json.loads(body))).encode("ascii")
        signal.alarm(0)
        target.write(len(reply).to_bytes(4, "big") + reply)
        target.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]))
