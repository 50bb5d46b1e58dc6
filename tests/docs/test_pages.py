"""The documentation is true where a program can tell: paths, links, generated pages, dependencies, words."""

import importlib.util
import re
import tomllib

import pytest

from tests.helpers.source import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")])


def test_architecture_names_only_files_that_exist():
    text = (ROOT / "docs/architecture.md").read_text()
    paths = set(re.findall(r"`(phalanx/[\w/]+(?:\.py|/))`", text))
    assert len(paths) > 20
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_the_tour_has_a_part_with_a_drawing_for_each_row():
    text = (ROOT / "docs/architecture.md").read_text()
    rows = re.findall(r"^\| (\d+) \| (.+?) \| .+\? \|$", text, re.MULTILINE)
    parts = dict(re.findall(r"^## (\d+)\. .+?: (.+)$", text, re.MULTILINE))
    assert len(rows) == 12
    assert {number: files for number, files in rows} == parts
    for part in re.split(r"^## ", text, flags=re.MULTILINE):
        if part[0].isdigit():
            assert "```text" in part, part.splitlines()[0]


def test_readme_has_every_folder_of_the_package():
    text = (ROOT / "README.md").read_text()
    for folder in (ROOT / "phalanx").iterdir():
        if folder.is_dir() and (folder / "__init__.py").exists():
            assert f"  {folder.name}/" in text, folder.name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_generated_pages_are_current():
    location = importlib.util.spec_from_file_location("write_docs", ROOT / "scripts/write_docs.py")
    module = importlib.util.module_from_spec(location)
    location.loader.exec_module(module)
    for path, text in module.pages().items():
        assert path.read_text() == text, f"{path.name} is old: run `make docs`"


def dependencies() -> dict[str, list[str]]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = {"Always": project["dependencies"], **project["optional-dependencies"]}
    return {group: [re.match(r"[\w-]+", line)[0] for line in lines] for group, lines in groups.items()}


def test_every_dependency_has_its_line_of_reason():
    text = (ROOT / "docs/dependencies.md").read_text()
    parts = dict(re.findall(r"^## `?(\w+)`?\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    for group, names in dependencies().items():
        rows = dict(re.findall(r"^\| ([\w-]+) \| (.+) \|$", parts[group], re.MULTILINE))
        rows.pop("package")
        assert sorted(rows) == sorted(names), group
        assert all(len(reason) > 4 for reason in rows.values())


def test_every_dependency_is_locked():
    lock = (ROOT / "requirements.lock").read_text()
    locked = {line.split("==")[0] for line in lock.splitlines() if "==" in line}
    for names in dependencies().values():
        for name in names:
            assert re.sub(r"[-_.]+", "-", name).lower() in locked, name
    assert "torch==2.13.0\n" in lock
    assert "://" not in lock
    assert "@" not in lock


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_page_fetches_from_or_points_to_a_private_place(page):
    text = page.read_text()
    for host in re.findall(r"https?://([\w.-]+)", text):
        assert host in ("127.0.0.1", "localhost") or host.endswith((".example", "example.com")), host
