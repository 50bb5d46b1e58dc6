"""The messages on the page of troubleshooting are those of the program, so that no row can go stale."""

from __future__ import annotations

import ast
import functools
import re

import pytest

from tests.helpers.source import ROOT

MESSAGES = (ROOT / "docs/troubleshooting.md").read_text().partition("## Without a message")[0]
FIRST_CELLS = re.findall(r"^\| (.+?) \| .+ \| .+ \|$", MESSAGES, re.MULTILINE)
ROWS = [cell for cell in FIRST_CELLS if cell != "message"]


@functools.cache
def texts() -> str:
    """Every piece of text of the program that is not cut by a value, one a line; and the script of the set-up."""
    pieces = [(ROOT / "scripts/setup").read_text()]
    for path in ROOT.glob("phalanx/**/*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        comments = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if id(node) not in comments and isinstance(node, ast.Constant) and isinstance(node.value, str):
                pieces += re.split(r"%[sdr]|%\.\d*f|%g", node.value)
    return "\n".join(pieces)


def fragments(row: str) -> list[str]:
    quoted = re.findall(r"`([^`]+)`", re.sub(r"^\d{3} ", "", row))
    return [part for each in quoted for part in each.split("…") if part.strip()]


def test_there_are_rows_for_what_users_meet():
    assert len(ROWS) > 100
    assert len(set(ROWS)) == len(ROWS)


@pytest.mark.parametrize("row", ROWS)
def test_the_program_says_so(row):
    assert fragments(row), "no message"
    assert [fragment for fragment in fragments(row) if fragment not in texts()] == []
    assert max(map(len, fragments(row))) >= 9, "it could be any message"
