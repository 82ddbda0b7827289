"""Golden files: what earlier versions have written, and texts that may not change unnoticed.

They are in tests/golden. After a change that is meant, this command writes them anew:

    GOLDEN=write scripts/test tests/ranks/checkpoints/test_golden_resume.py

Or another test of such files.
"""

import difflib
import os
from pathlib import Path

import keras_dist

FOLDER = Path(__file__).parents[1] / "golden"
WRITES = os.environ.get("GOLDEN") == "write"


def check(name, text):
    """Compares a text with a golden file, or writes it there. Collective: every rank."""
    path = FOLDER / name
    if WRITES:
        if keras_dist.rank() == 0:
            path.write_text(text)
        keras_dist.barrier()
    found = path.read_text()
    assert text == found, "".join(
        difflib.unified_diff(found.splitlines(True), text.splitlines(True), str(path), "now")
    )
