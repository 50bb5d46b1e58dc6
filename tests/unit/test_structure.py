"""What a reader of the source relies on: small files and functions, a docstring on top, no leftovers."""

import ast
import io
import re
import tokenize

from tests.helpers.source import ROOT, modules

LONGEST_FILE = 600
LONGEST_FUNCTION = 80
AVOIDED = re.compile(r"(Manager|Helper|Utils|Mixin|V2|Impl)$")


def too_long(path: str, tree: ast.Module) -> list[str]:
    found = []
    if (lines := (ROOT / path).read_text().count("\n")) > LONGEST_FILE:
        found.append(f"{path} has {lines} lines")
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or 0) - node.lineno + 1
            if length > LONGEST_FUNCTION:
                found.append(f"{path}: {node.name} has {length} lines")
    return found


def complaints(path: str, tree: ast.Module) -> list[str]:
    text, found = (ROOT / path).read_text(), too_long(path, tree)
    if not ast.get_docstring(tree) and tree.body and not path.endswith("__init__.py"):
        found.append(f"{path} has no docstring")
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and AVOIDED.search(node.name):
            found.append(f"{path}: {node.name}")
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and re.search(r"\b(TODO|FIXME|XXX|HACK)\b", token.string):
            found.append(f"{path}:{token.start[0]}: {token.string}")
    return found


def deadlines_by_the_wall_clock(path: str) -> list[str]:
    """Clocks are set: a span of time is measured with time.monotonic()."""
    return [
        f"{path}:{node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(modules()[path])
        if isinstance(node, (ast.BinOp, ast.Compare, ast.AugAssign)) and "time.time()" in ast.unparse(node)
    ]


def test_every_module_is_small_and_explained():
    found = modules() | modules("benchmarks") | modules("scripts")
    assert [line for path, tree in found.items() for line in complaints(path, tree)] == []


def test_tests_are_small_too():
    assert [line for path, tree in modules("tests").items() for line in too_long(path, tree)] == []


def test_nothing_waits_by_a_clock_that_is_set():
    assert [line for path in modules() for line in deadlines_by_the_wall_clock(path)] == []


def test_no_module_is_a_drawer():
    assert not [path for path in modules() if re.search(r"/(utils?|helpers?|common|misc)\.py$", path)]
