"""The navigation of the site and the list of decisions name every page."""

import re

import pages

ROOT = pages.ROOT
DOCS = ROOT / "docs"
DECISIONS = DOCS / "decisions"


def test_every_page_is_in_the_navigation():
    named = set(re.findall(r"([\w./-]+\.md)\s*$", (ROOT / "mkdocs.yml").read_text(), re.M))
    missing = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")} - named
    assert not missing, f"mkdocs.yml: nav lacks {sorted(missing)}"


def test_every_decision_is_listed():
    listed = set(re.findall(r"\((\d\S+\.md)\)", (DECISIONS / "index.md").read_text()))
    assert listed == {path.name for path in DECISIONS.glob("0*.md")}
