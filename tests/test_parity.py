"""The table of docs/backends.md agrees with the recorded outcomes."""

import json

import parity
import pytest

DOCUMENT = f"Before.\n{parity.BEGIN}| | A |\n|---|\n| second | yes |\n{parity.END}After.\n"


@pytest.fixture
def table(tmp_path):
    """A function that writes records and updates a document; returns status and rows."""
    document = tmp_path / "backends.md"
    document.write_text(DOCUMENT)

    def renew(*records, arguments=()):
        for number, (backend, ranks, rows) in enumerate(records):
            record = {"backend": backend, "ranks": ranks, "rows": rows}
            (tmp_path / f"{number}.json").write_text(json.dumps(record))
        status = parity.main([*arguments, "--document", str(document), str(tmp_path)])
        return status, document.read_text()

    return renew


def row(title, text):
    [line] = [line for line in text.splitlines() if line.startswith(f"| {title} |")]
    return [cell.strip() for cell in line.split("|")[2:-1]]


def test_cells(table):
    _, text = table(
        ("tensorflow", 1, {"first": {"a": "passed", "b": "Skipped: one rank"}}),
        ("tensorflow", 2, {"first": {"a": "passed", "b": "passed"}, "second": {"c": "passed"}}),
        ("tensorflow", 3, {"first": {"a": "Skipped: 3 ranks", "b": "passed"}}),
        ("jax", 2, {"first": {"a": "Skipped: slow", "b": "passed"}, "second": {"c": "failed"}}),
        ("torch", 1, {"second": {"c": "passed"}}),
        ("torch", 2, {"second": {"c": "Skipped: not there"}}),
    )
    assert row("first", text) == ["yes", "in part: slow", "-"]
    assert row("second", text) == ["yes", "fails", "no: not there"]
    assert "TensorFlow on 1, 2 and 3 ranks, JAX on 2 ranks, torch on 1 and 2 ranks;" in text
    assert text.index("| second |") < text.index("| first |")  # old rows first, then new ones
    assert text.startswith("Before.\n")
    assert text.endswith("After.\n")


def test_a_difference_is_found_and_changes_nothing(table, capsys):
    record = ("jax", 2, {"second": {"a": "passed"}})
    assert table(record, arguments=["--check"]) == (1, DOCUMENT)
    assert "-| second | yes |\n" in capsys.readouterr().out
    _, written = table(record)
    assert table(record, arguments=["--check"]) == (0, written)
    assert table(("jax", 2, {"second": {"a": "failed"}}), arguments=["--check"])[0] == 1
