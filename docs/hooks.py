"""What mkdocs needs beside the pages in this folder: README.md as the first page, a page for each file of the
repository that a page links to, and formulas as MathML."""

from __future__ import annotations

import html
import json
import posixpath
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(\]\()(?!https?:|#)([^)\s#]+)")
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)  # of pymdownx.arithmatex
LANGUAGES = {"Dockerfile": "dockerfile", ".json": "json", ".py": "python", ".service": "ini"}
SOURCE, PAGE = "source/", ".page.md"  # of a page that shows a file
UNSEARCHED = "---\nsearch:\n  exclude: true\n---\n"


def on_files(files: Files, config: Any) -> Files:
    """Adds README.md, and what it and the pages link to, and so on."""
    pages = ["README.md", *(f"docs/{file.src_uri}" for file in files.documentation_pages())]
    files.append(File.generated(config, "index.md", content=text_of("README.md")))
    for page in pages:
        for _, link in LINK.findall(text_of(page)):
            path = followed(link, page)
            if uri_of(path).startswith(SOURCE) and files.get_file_from_path(uri_of(path)) is None:
                files.append(File.generated(config, uri_of(path), content=UNSEARCHED + shown(path)))
                pages += [path] if path.endswith(".md") else []
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links that hold in the repository become links that hold in the site."""
    here = page.file.src_uri

    def moved(match: re.Match[str]) -> str:
        target = uri_of(followed(match[2], path_of(here)))
        return match[1] + posixpath.relpath(target, posixpath.dirname(here) or ".")

    return LINK.sub(moved, markdown)


def on_page_content(content: str, **_: Any) -> str:
    """Formulas become MathML, which browsers draw by themselves: no script, no request."""

    def drawn(match: re.Match[str]) -> str:
        return convert(html.unescape(match[2]).strip(), display="block" if match[1] == "div" else "inline")

    return FORMULA.sub(drawn, content)


def text_of(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def followed(link: str, page: str) -> str:
    """The path in the repository that a link of one of its pages leads to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), link))


def uri_of(path: str) -> str:
    """Where a file of the repository is in the site."""
    if path == "README.md":
        return "index.md"
    return path.removeprefix("docs/") if path.startswith("docs/") else SOURCE + path + PAGE


def path_of(uri: str) -> str:
    if uri == "index.md":
        return "README.md"
    return uri.removeprefix(SOURCE).removesuffix(PAGE) if uri.startswith(SOURCE) else f"docs/{uri}"


def shown(path: str) -> str:
    """A file as Markdown."""
    text = text_of(path)
    if path.endswith(".md"):
        return text
    if path.endswith(".ipynb"):
        return "\n\n".join(shown_cell(cell) for cell in json.loads(text)["cells"])
    return f"# {path}\n\n" + fenced(text, LANGUAGES.get(Path(path).suffix or path.rpartition("/")[2], "text"))


def shown_cell(cell: dict[str, Any]) -> str:
    text = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return text
    return "\n".join([fenced(text, "python"), *map(shown_output, cell["outputs"])])


def shown_output(output: dict[str, Any]) -> str:
    """A picture, or text."""
    data = output.get("data", {})
    if "image/png" in data:
        return f'<img alt="" src="data:image/png;base64,{"".join(data["image/png"]).replace(chr(10), "")}">\n'
    return fenced("".join(output.get("text") or data["text/plain"]), "text")


def fenced(text: str, language: str) -> str:
    return f"````{language}\n{text.rstrip()}\n````\n"
