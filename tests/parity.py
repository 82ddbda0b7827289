"""Generates the table of docs/backends.md from the outcomes of tests on each backend.

A test in tests/parallel with the mark `@pytest.mark.parity("the title of a row")` belongs to that
row. Each run of pytest writes the outcomes of such tests to the folder in the environment variable
PARITY_RECORDS, if set; scripts/test collects the records of all its runs.

    python tests/parity.py FOLDER            writes the table
    python tests/parity.py --check FOLDER    prints the differences; exits with 1 if there are any

Rows keep their order in the document; new rows come last.
"""

import argparse
import difflib
import json
import re
import sys
from pathlib import Path

DOCUMENT = Path(__file__).parents[1] / "docs" / "backends.md"
BACKENDS = {"tensorflow": "TensorFlow", "jax": "JAX", "torch": "torch"}
BEGIN, END = "<!-- made by tests/parity.py -->\n", "<!-- end -->\n"
NOTHING = "-"


def main(arguments):
    """Writes the table or checks it; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where the records are")
    parser.add_argument("--check", action="store_true", help="change nothing; 1 where it differs")
    parser.add_argument("--document", type=Path, default=DOCUMENT)
    options = parser.parse_args(arguments)
    records = [json.loads(path.read_text()) for path in sorted(options.folder.glob("*.json"))]
    found = options.document.read_text()
    wanted = renewed(found, records)
    if options.check and found != wanted:
        lines = (text.splitlines(True) for text in (found, wanted))
        sys.stdout.writelines(difflib.unified_diff(*lines, str(options.document), "what ran", n=0))
        print(f"The document is not what ran. Write it: python tests/parity.py {options.folder}")
        return 1
    options.document.write_text(wanted)
    return 0


def renewed(document, records):
    """Returns the document with the table replaced by that of the records."""
    head, old, tail = re.split(f"{BEGIN}|{END}", document)
    places = re.findall(r"^\| (.+?) \|", old, re.MULTILINE)
    titles = {title: None for record in records for title in record["rows"]}
    known = [title for title in places if title in titles]
    order = known + [title for title in titles if title not in known]
    lines = [ran(records), "", f"| | {' | '.join(BACKENDS.values())} |", "|---" * 4 + "|"]
    for title in order:
        cells = (cell(outcomes(records, backend, title)) for backend in BACKENDS)
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return head + BEGIN + "".join(f"{line}\n" for line in lines) + END + tail


def ran(records):
    """Returns a sentence about the numbers of ranks."""
    parts = []
    for backend, name in BACKENDS.items():
        ranks = sorted({record["ranks"] for record in records if record["backend"] == backend})
        *first, last = map(str, ranks or ["no"])
        listed = f"{', '.join(first)} and {last}" if first else last
        parts.append(f"{name} on {listed} {'rank' if ranks == [1] else 'ranks'}")
    told = f"These tests ran with {parts[0]}, {parts[1]}, {parts[2]}"
    return f"{told}; most rows on 2, some on each number."


def outcomes(records, backend, title):
    """Returns the outcomes of all runs of each test of a row on a backend."""
    found = {}
    for record in records:
        if record["backend"] == backend:
            for test, outcome in record["rows"].get(title, {}).items():
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
