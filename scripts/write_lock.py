"""Write requirements.lock: the exact versions that `make setup` installs, from the environment this runs in.

Only packages that phalanx with its extras needs are listed, as `name==version` without local parts such as `+cpu`, so
that pip chooses the build for the machine. Run it in an environment where the new versions have passed the tests.
"""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

EXTRAS = ("ray", "test", "check")
TARGET = Path(__file__).resolve().parents[1] / "requirements.lock"
HEADER = "# Exact versions for `make setup`, as pip constraints. Written by scripts/write_lock.py; do not edit.\n"


def name_of(text: str) -> str:
    return re.sub(r"[-_.]+", "-", text).lower()


def needed(package: str, extras: tuple[str, ...], seen: dict[str, set[str]]) -> None:
    """Add to `seen` every package that `package` with `extras` requires in this environment: name to its extras."""
    for line in metadata.requires(package) or []:
        requirement = Requirement(line)
        marker = requirement.marker
        if marker and not any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            continue
        name, wanted = name_of(requirement.name), set(requirement.extras)
        if name in seen and wanted <= seen[name]:
            continue
        seen.setdefault(name, set()).update(wanted)
        try:
            needed(name, tuple(wanted), seen)
        except metadata.PackageNotFoundError:
            continue


def lock() -> str:
    """The text of the lock file."""
    seen: dict[str, set[str]] = {}
    needed("phalanx", EXTRAS, seen)
    lines = []
    for name in sorted(seen):
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        lines.append(f"{name}=={version.partition('+')[0]}\n")
    return HEADER + "".join(lines)


if __name__ == "__main__":
    TARGET.write_text(lock())
    print(f"wrote {TARGET.name}")
