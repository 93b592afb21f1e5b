"""What the documentation quotes is what the code says."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

import infer

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
QUOTE = re.compile(r"^```python\n# (src/\S+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def quotes() -> list[tuple[Path, str, str]]:
    return [(page, file, code) for page in PAGES for file, code in QUOTE.findall(page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize(("page", "file", "code"), quotes(), ids=lambda value: getattr(value, "name", None))
def test_quoted_code_is_in_the_file(page: Path, file: str, code: str) -> None:
    """However deep it stands there: the documentation may shift it to the left."""
    source = (ROOT / file).read_text(encoding="utf-8")
    wanted = textwrap.dedent(code)
    lines = source.splitlines(keepends=True)
    count = len(wanted.splitlines())
    found = (textwrap.dedent("".join(lines[at : at + count])) for at in range(len(lines)))
    assert wanted in found, f"{page.name} quotes {file}, which no longer says that"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_nothing_is_left_to_fill_in(page: Path) -> None:
    assert "@@" not in page.read_text(encoding="utf-8")


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 1000


def test_every_page_that_has_python_is_run() -> None:
    """By test_commands.py, which has to name it. The page of the server shows a client, which others test."""
    tests = (ROOT / "tests" / "integration" / "test_commands.py").read_text(encoding="utf-8")
    pages = [page for page in PAGES if re.search(r"```python\n(?!# src/)", page.read_text(encoding="utf-8"))]
    assert [page.name for page in pages if f'{page.name}"' not in tests] == ["server.md"]


def test_the_reference_has_every_public_name() -> None:
    named = re.findall(
        r"^::: infer\.(\w+)$", (ROOT / "docs" / "reference.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert sorted(named) == sorted(infer.__all__)


def test_there_are_quotes() -> None:
    assert len(quotes()) >= 6


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = [link for link in LINK.findall(page.read_text(encoding="utf-8")) if not link.startswith("http")]
    missing = [link for link in links if not (page.parent / link).exists()]
    assert missing == []


RECIPES = [ROOT / "CONTRIBUTING.md", ROOT / "docs" / "sampling.md"]
CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")


def test_recipes_name_what_is_there() -> None:
    """Files, by any end of their path; classes, functions, fields and tables, as words of the code."""
    files = [path for folder in ("src", "tests", "benchmarks", "docs", ".ci") for path in (ROOT / folder).rglob("*")]
    paths = [f"/{path.relative_to(ROOT)}" for path in [*files, *ROOT.iterdir()]]
    code = [path.read_text(encoding="utf-8") for path in files if path.suffix in (".py", ".json")]
    words = set(re.findall(r"\w+", "\n".join(code) + (ROOT / "Makefile").read_text(encoding="utf-8")))
    lost = []
    for recipe in RECIPES:
        for name in CODE.findall(recipe.read_text(encoding="utf-8")):
            if re.fullmatch(r"[\w./]+\.(py|md)", name) and "NAME" not in name:
                lost += [] if any(path.endswith(f"/{name}") for path in paths) else [name]
            elif re.fullmatch(r"[A-Za-z_][\w.]*", name):
                lost += [part for part in name.split(".") if part not in words]
    assert lost == []
