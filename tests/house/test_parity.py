"""The tables of docs/backends.md and docs/exactness.md agree with the recorded outcomes."""

import json

import parity
import pytest

DOCUMENT = f"Before.\n{parity.BEGIN}| | A |\n|---|\n| second | yes |\n{parity.END}After.\n"


@pytest.fixture
def table(tmp_path, monkeypatch):
    """A function that writes records and updates a document; returns status and rows."""
    document = tmp_path / "page.md"
    document.write_text(DOCUMENT)

    def renew(*records, arguments=(), mark="parity"):
        monkeypatch.setattr(parity, "DOCUMENTS", {mark: document.name})
        for number, (backend, ranks, rows, *differences) in enumerate(records):
            record = {"backend": backend, "ranks": ranks, mark: rows, "difference": differences}
            (tmp_path / f"{number}.json").write_text(json.dumps(record))
        status = parity.main([*arguments, "--docs", str(tmp_path), str(tmp_path)])
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


def test_the_largest_difference_on_several_ranks_is_rounded_up(table):
    passed, skipped = {"a": "passed"}, {"a": "Skipped: not there"}
    _, text = table(
        (
            "jax",
            2,
            {"first": passed, "second": passed},
            (2e-8, ["first", "second"]),
            (3e-7, ["first"]),
        ),
        ("torch", 1, {"first": passed}, (0.5, ["first"])),
        ("torch", 3, {"first": passed, "second": skipped}, (0.0, ["first"])),
        mark="exactness",
    )
    assert row("first", text) == ["-", "1e-6", "1e-8"]
    assert row("second", text) == ["-", "1e-7", "no: not there"]
    jax, torch = "2 cases with JAX on 2 ranks (2 on several)", "2 cases with torch on 1 and 3 ranks"
    assert f"{jax}, and {torch} (1 on several)." in text


def test_a_check_takes_the_numbers_of_the_document(table):
    record = ("jax", 2, {"first": {"a": "passed"}}, (3e-8, ["first"]))
    check = {"mark": "exactness", "arguments": ["--check"]}
    _, text = table(record, mark="exactness")
    assert table((*record[:3], (3e-7, ["first"])), **check) == (0, text)
    skipped = {"first": {"a": "Skipped: not there"}}
    assert table((*record[:2], skipped, record[3]), **check) == (1, text)
    assert table(record, record, **check) == (1, text)  # another number of cases
