"""Generates tables of docs/ from the outcomes of tests on each backend.

A test in tests/ranks with the mark `@pytest.mark.parity("the title of a row")` belongs to that
row of docs/backends.md, one with the mark `exactness` to that of docs/exactness.md. Each run of
pytest writes the outcomes of such tests, and the differences from one process that they have seen,
to the folder in the environment variable PARITY_RECORDS, if set; scripts/test collects the records
of all its runs.

    python tests/parity.py FOLDER            writes the tables
    python tests/parity.py --check FOLDER    prints the differences; exits with 1 if there are any

Rows keep their order in the document; new rows come last. The tests compare differences to their
bound, and CPUs differ in the last bits, so a check takes the numbers of the document for right.
"""

import argparse
import difflib
import json
import math
import re
import sys
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
DOCUMENTS = {"parity": "backends.md", "exactness": "exactness.md"}
BACKENDS = {"tensorflow": "TensorFlow", "jax": "JAX", "torch": "torch"}
BEGIN, END = "<!-- made by tests/parity.py -->\n", "<!-- end -->\n"
NOTHING = "-"
LEAST = 1e-8  # less is equal
NUMBER = re.compile(r"1e-\d+")


def main(arguments):
    """Writes the tables or checks them; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where the records are")
    parser.add_argument("--check", action="store_true", help="change nothing; 1 where it differs")
    parser.add_argument("--docs", type=Path, default=DOCS)
    options = parser.parse_args(arguments)
    records = [json.loads(path.read_text()) for path in sorted(options.folder.glob("*.json"))]
    status = 0
    for mark, name in DOCUMENTS.items():
        document = options.docs / name
        found = document.read_text()
        wanted = renewed(found, records, mark, keeps_numbers=options.check)
        if not options.check:
            document.write_text(wanted)
        elif found != wanted:
            lines = (text.splitlines(True) for text in (found, wanted))
            sys.stdout.writelines(difflib.unified_diff(*lines, str(document), "what ran", n=0))
            status = 1
    if status:
        print(
            f"The documents are not what ran. Write them: python tests/parity.py {options.folder}"
        )
    return status


def renewed(document, records, mark, keeps_numbers):
    """Returns the document with the table replaced by that of the records."""
    head, old, tail = re.split(f"{BEGIN}|{END}", document)
    places = {title: line for line in old.splitlines() if (title := title_of(line))}
    titles = {title: None for record in records for title in record[mark]}
    known = [title for title in places if title in titles]
    order = known + [title for title in titles if title not in known]
    told = ran(records) if mark == "parity" else drawn(records)
    lines = [told, "", f"| | {' | '.join(BACKENDS.values())} |", "|---" * 4 + "|"]
    for title in order:
        cells = [cell(outcomes(records, backend, title, mark)) for backend in BACKENDS]
        if mark == "exactness":
            seen = [largest(records, backend, title) for backend in BACKENDS]
            cells = [
                number if text == "yes" else text for number, text in zip(seen, cells, strict=True)
            ]
        if keeps_numbers:
            before = places.get(title, "").split(" | ")[1:]
            for place, text in enumerate(before[: len(cells)]):
                kept = text.removesuffix(" |")
                if NUMBER.fullmatch(kept) and NUMBER.fullmatch(cells[place]):
                    cells[place] = kept
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return head + BEGIN + "".join(f"{line}\n" for line in lines) + END + tail


def title_of(line):
    found = re.match(r"\| (.+?) \|", line)
    return found and found[1]


def ran(records):
    """Returns a sentence about the numbers of ranks."""
    parts = [f"{name} on {ranks(records, backend)}" for backend, name in BACKENDS.items()]
    told = f"These tests ran with {parts[0]}, {parts[1]}, {parts[2]}"
    return f"{told}; most rows on 2, some on each number."


def drawn(records):
    """Returns a sentence about the numbers of cases."""
    records = [record for record in records if record["difference"]]
    parts = []
    for backend, name in BACKENDS.items():
        cases = [
            record["ranks"]
            for record in records
            if record["backend"] == backend
            for _ in record["difference"]
        ]
        several = sum(number > 1 for number in cases)
        told = f"{len(cases)} cases with {name} on {ranks(records, backend)}"
        parts.append(f"{told} ({several} on several)")
    return f"These numbers are of {parts[0]}, {parts[1]}, and {parts[2]}."


def ranks(records, backend):
    """Returns the numbers of ranks of a backend, in words."""
    found = sorted({record["ranks"] for record in records if record["backend"] == backend})
    *first, last = map(str, found or ["no"])
    listed = f"{', '.join(first)} and {last}" if first else last
    return f"{listed} {'rank' if found == [1] else 'ranks'}"


def largest(records, backend, title):
    """Returns the largest difference of a row on several ranks, rounded up to a power of ten."""
    seen = [
        difference
        for record in records
        if record["backend"] == backend and record["ranks"] > 1
        for difference, titles in record["difference"]
        if title in titles
    ]
    if not seen:
        return NOTHING
    return f"1e-{math.floor(-math.log10(max(*seen, LEAST)) + 1e-9)}"


def outcomes(records, backend, title, mark):
    """Returns the outcomes of all runs of each test of a row on a backend."""
    found = {}
    for record in records:
        if record["backend"] == backend:
            for test, outcome in record[mark].get(title, {}).items():
                # Outcomes on one rank say nothing about several ranks.
                if record["ranks"] > 1 or outcome == "failed":
                    found.setdefault(test, []).append(outcome)
    return list(found.values())


def cell(tests):
    """Returns the text of a cell, from the outcomes of each of its tests."""
    if not tests:
        return NOTHING
    if any("failed" in test for test in tests):
        return "fails"
    missing = [test for test in tests if "passed" not in test]
    reasons = "; ".join(sorted({test[-1].removeprefix("Skipped: ") for test in missing}))
    if not missing:
        return "yes"
    return f"{'no' if len(missing) == len(tests) else 'in part'}: {reasons}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
