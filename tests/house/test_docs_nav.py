"""Links and the navigation of the site lead to pages, and the list of decisions names them all."""

import ast
import importlib.util
import re

import pages
import pytest

DOCS = pages.ROOT / "docs"
DECISIONS = DOCS / "decisions"
SPEC = importlib.util.spec_from_file_location("website", DOCS / "_site" / "website.py")
website = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(website)


def test_links_and_navigation_lead_to_pages():
    assert website.faults() == []


@pytest.mark.parametrize("page", sorted((DOCS / "life").glob("*.md")), ids=lambda page: page.stem)
def test_a_life_links_functions_that_exist(page):
    links = re.findall(r"\[`([\w.]+)`\]\((\S+\.py)\)", page.read_text())
    assert links
    for name, path in links:
        node = ast.parse((page.parent / path).read_text())
        for part in name.split("."):
            kinds = ast.FunctionDef | ast.ClassDef
            found = [each for each in node.body if isinstance(each, kinds) and each.name == part]
            assert found, f"{page.name}: {path} has no {name}"
            node = found[0]


@pytest.fixture
def repository(tmp_path, monkeypatch):
    texts = {
        "README.md": "[Guide](docs/guide/start.md#first) [Web](https://keras.io) [Here](#here)\n"
        '<source srcset="docs/plot.svg"><img src="docs/plot.svg">',
        "docs/guide/start.md": "[Front](../../README.md) [Script](../../examples/train.py)",
        "docs/plot.svg": "<svg/>",
        "examples/train.py": "import keras  # [a](b)",
        "mkdocs.yml": "nav:\n  - Front: index.md\n  - Guide:\n      - guide/start.md\n",
    }
    for name, text in texts.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(website, "ROOT", tmp_path)
    monkeypatch.setattr(website, "DOCS", tmp_path / "docs")
    monkeypatch.setattr(website, "FRONT", tmp_path / "README.md")
    monkeypatch.setattr(website, "CONFIGURATION", tmp_path / "mkdocs.yml")
    return tmp_path


def test_pages_come_with_what_they_link_to(repository, tmp_path):
    folder = tmp_path / "build"
    (folder / "guide").mkdir(parents=True)
    (folder / "guide" / "removed.md").touch()
    website.write(folder)
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert {str(path.relative_to(folder)): path.read_text() for path in files} == {
        "index.md": "[Guide](guide/start.md#first) [Web](https://keras.io) [Here](#here)\n"
        '<source srcset="plot.svg"><img src="plot.svg">',
        "guide/start.md": "[Front](../index.md) [Script](../examples/train.py)",
        "plot.svg": "<svg/>",
        "examples/train.py": "import keras  # [a](b)",
    }
    assert website.faults() == []


@pytest.mark.parametrize(
    "link",
    ["nowhere.md", "![Plot](nowhere.svg)", '<img src="nowhere.svg">', "/docs/plot.svg", "guide/"],
)
def test_a_broken_link_is_named(repository, link):
    page = repository / "docs" / "guide" / "start.md"
    page.write_text(link if link[0] in "!<" else f"[Link]({link})")
    target = re.sub(r'^!\[Plot\]\(|^<img src="|\)$|">$', "", link)
    assert website.faults() == [f"{page}: links to {target}, which is no file of the repository"]


def test_the_navigation_has_every_page_and_no_other(repository):
    (repository / "mkdocs.yml").write_text("nav:\n  - Front: index.md\n  - guide/stop.md\n")
    assert website.faults() == [
        "mkdocs.yml: nav has guide/stop.md, which is no page",
        "mkdocs.yml: nav lacks guide/start.md",
    ]


def test_every_decision_is_listed():
    listed = set(re.findall(r"\((\d\S+\.md)\)", (DECISIONS / "index.md").read_text()))
    assert listed == {path.name for path in DECISIONS.glob("0*.md")}
