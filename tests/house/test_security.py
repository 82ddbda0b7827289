"""Each statement of docs/security.md has tests, which exist."""

import re

import pytest
from test_docs import ROOT

PAGE = (ROOT / "docs" / "security.md").read_text()
ROWS = re.findall(r"^\| ([A-Z`].*?) \| (.*) \|$", PAGE, re.MULTILINE)


def test_all_rows_are_found():
    assert len(ROWS) == sum(line.startswith("| ") for line in PAGE.splitlines()) - PAGE.count(
        "|---|"
    )


@pytest.mark.parametrize(("statement", "tests"), ROWS, ids=[row[0][:40] for row in ROWS])
def test_a_statement_has_tests(statement, tests):
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", tests)
    assert len(named) == tests.count("::")
    for file, name in named:
        texts = [path.read_text() for path in (ROOT / "tests").rglob(file)]
        assert any(f"def {name}(" in text for text in texts), f"{file}::{name}"
