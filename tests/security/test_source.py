"""Gates on the source itself: nothing that runs data as code, and no check that `python -O` would drop.

The allowlist is empty. Each rule is also run on a line that breaks it, so that a rule which sees nothing is noticed.
"""

import ast
import re

import pytest

from tests.helpers.source import PACKAGE, ROOT, dotted, imported_names, modules

BANNED_MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "telnetlib"}
BANNED_CALLS = {
    "eval": "runs text as code",
    "exec": "runs text as code",
    "torch.load": "unpickles",
    "numpy.load": "can unpickle",
    "yaml.load": "can build any object",
    "yaml.unsafe_load": "builds any object",
    "yaml.full_load": "can build objects",
    "yaml.load_all": "can build any object",
    "os.system": "runs a shell",
    "os.popen": "runs a shell",
    "subprocess.getoutput": "runs a shell",
    "subprocess.getstatusoutput": "runs a shell",
    "jinja2.Environment": "is no sandbox",
    "jinja2.Template": "is no sandbox",
    "jinja2.environment.Environment": "is no sandbox",
    "tempfile.mktemp": "is a race",
    "torch.hub.load": "runs code from the net",
    "importlib.util.spec_from_file_location": "runs code from a file",
    "runpy.run_path": "runs code from a file",
}


def problems(tree: ast.Module, path: str) -> list[str]:
    """Everything in one module that a rule forbids, as `path:line: what`."""
    names = imported_names(tree)
    found = []

    def say(node, what):
        found.append(f"{path}:{node.lineno}: {what}")

    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            stated = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            for module in stated:
                if module.partition(".")[0] in BANNED_MODULES:
                    say(node, f"imports {module}")
        elif isinstance(node, ast.Call):
            call = full_name(node.func, names)
            if call in BANNED_CALLS:
                say(node, f"{call} {BANNED_CALLS[call]}")
            for keyword in node.keywords:
                given = getattr(keyword.value, "value", None)
                if keyword.arg == "shell" and given is not False:
                    say(node, "shell=True")
                if keyword.arg in ("trust_remote_code", "allow_pickle") and given is not False:
                    say(node, f"{keyword.arg} is on")
        elif isinstance(node, ast.Assert):
            say(node, "assert disappears under python -O")
        elif (
            isinstance(node, (ast.Attribute, ast.Name))
            and path != "phalanx/env.py"
            and full_name(node, names) in ("os.environ", "os.environb", "os.getenv", "os.putenv")
        ):
            say(node, "only phalanx/env.py reads the environment")
    return found


def full_name(node: ast.expr, names: dict[str, str]) -> str:
    name = dotted(node)
    first, dot, rest = name.partition(".")
    return names.get(first, first) + dot + rest


def test_the_package_breaks_no_rule():
    assert len(modules()) > 30
    assert [line for path, tree in modules().items() for line in problems(tree, path)] == []


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from cloudpickle import loads",
        "import torch; torch.load('x', weights_only=True)",
        "from torch import load as read; read('x')",
        "import yaml; yaml.load(x, Loader=yaml.SafeLoader)",
        "eval(text)",
        "exec(text)",
        "import subprocess; subprocess.run('ls', shell=True)",
        "import subprocess as s; s.run('ls', shell=flag)",
        "import os; os.system('ls')",
        "import jinja2; jinja2.Environment()",
        "from jinja2 import Environment; Environment()",
        "from jinja2 import Template; Template('x')",
        "f(trust_remote_code=True)",
        "f(trust_remote_code=option)",
        "import numpy as np; np.load('x', allow_pickle=True)",
        "assert request",
        "import os; os.environ['X']",
        "from os import environ; environ.get('X')",
        "import os; os.getenv('X')",
    ],
)
def test_each_rule_sees_what_it_forbids(line):
    assert problems(ast.parse(line), "phalanx/example.py")


@pytest.mark.parametrize(
    "line",
    [
        "model.eval()",
        "import yaml; yaml.safe_load(x)",
        "from jinja2.sandbox import ImmutableSandboxedEnvironment; ImmutableSandboxedEnvironment()",
        "import subprocess; subprocess.run(['ls'], shell=False)",
        "import os; os.path.join('a')",
    ],
)
def test_no_rule_sees_more_than_that(line):
    assert problems(ast.parse(line), "phalanx/example.py") == []


def test_environment_is_read_in_one_file():
    assert problems(ast.parse("import os; os.environ"), "phalanx/env.py") == []


def test_shipped_pages_load_nothing_from_elsewhere():
    """Whatever the server shows works without a network: no CDN, no font, no tracker."""
    outside = re.compile(
        r"""(?:src|href|url|import|fetch)\s*(?:=|\(|\s)\s*["'(]?\s*(?:https?:)?//(?!127\.0\.0\.1|localhost)"""
    )
    for path in PACKAGE.rglob("*"):
        if path.suffix in (".html", ".js", ".css", ".svg", ".mjs"):
            assert not outside.search(path.read_text()), path
    cdn = re.compile(r"cdn\.|jsdelivr|unpkg|googleapis|fastapi\.tiangolo")
    for path, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert not cdn.search(node.value), f"{path}:{node.lineno}"


def test_no_secret_and_no_private_place_is_in_the_repository():
    """Keys by their shape, and addresses that mean something on one machine only."""
    secret = re.compile(r"\b(hf_[A-Za-z0-9]{30,}|sk-[A-Za-z0-9]{30,}|AKIA[A-Z0-9]{16})\b|BEGIN [A-Z ]*PRIVATE KEY")
    files = [path for folder in ("phalanx", "docs", "scripts", "benchmarks") for path in (ROOT / folder).rglob("*")]
    for path in files:
        if path.is_file() and path.suffix in (".py", ".md", ".sh", ".toml", ".json", ".yaml", ""):
            assert not secret.search(path.read_text(errors="replace")), path


@pytest.mark.parametrize(("package", "least"), [("starlette", (1, 3, 0)), ("ray", (2, 59)), ("jinja2", (3, 1, 6))])
def test_pinned_versions_are_not_the_broken_ones(package, least):
    lock = dict(line.split("==") for line in (ROOT / "requirements.lock").read_text().splitlines() if "==" in line)
    assert tuple(int(part) for part in lock[package].split(".")[:3]) >= least
