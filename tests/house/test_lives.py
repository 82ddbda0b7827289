"""The pages of docs/life link functions of the package that exist."""

import ast
import re
from pathlib import Path

import pytest

PAGES = sorted((Path(__file__).resolve().parents[2] / "docs" / "life").glob("*.md"))
LINK = re.compile(r"\[`([\w./]+)`\]\((\.\./\.\./keras_dist/[\w./]+)\)")
LINES = 60  # of a page


def exists(name: str, file: Path) -> bool:
    """Returns whether `Class.method` is defined in a file; a name with slashes is the file."""
    body: ast.AST | None = ast.parse(file.read_text())
    for each in [] if "/" in name else name.split("."):
        nodes = [] if body is None else ast.walk(body)
        body = next((node for node in nodes if getattr(node, "name", None) == each), None)
    return body is not None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_life_names_what_exists(page):
    links = LINK.findall(page.read_text())
    assert len(links) > 10
    assert not [name for name, path in links if not exists(name, page.parent / path)]
    assert len(page.read_text().splitlines()) <= LINES


def test_a_missing_function_is_found():
    package = Path(__file__).resolve().parents[2] / "keras_dist"
    assert exists("init", package / "runtime" / "job.py")
    assert not exists("missing", package / "runtime" / "job.py")
