"""The package's own source, parsed, for tests that look at it."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "phalanx"


@cache
def modules(folder: str = PACKAGE.name) -> dict[str, ast.Module]:
    """Every Python file of the package, or of another folder: its path from the root, and its tree."""
    found = sorted((ROOT / folder).rglob("*.py"))
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in found}


def dotted(node: ast.expr) -> str:
    """`a.b.c` for a name or attribute, else an empty text."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


def imported_names(tree: ast.Module) -> dict[str, str]:
    """Every name that an import binds, to what it stands for: `{"np": "numpy", "load": "torch.load"}`."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
                names.setdefault(alias.name, alias.name)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names
