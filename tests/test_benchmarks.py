"""The benchmarks run and say what they found; how fast anything is depends on the machine."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import told

FOLDER = Path(__file__).parents[1] / "benchmarks"
COMMANDS = [path for path in sorted(FOLDER.glob("*.py")) if "def main():" in path.read_text()]


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: path.stem)
def test_each_says_what_it_takes(path):
    job = subprocess.run(
        [sys.executable, str(path), "--help"], capture_output=True, text=True, timeout=60
    )
    assert job.returncode == 0, job.stderr
    assert "--output" in job.stdout


def test_allreduce(tmp_path):
    options = ["--quick", "--ranks", "2", "--sizes", "4096", "65536", "--output", str(tmp_path)]
    job = subprocess.run(
        [sys.executable, str(FOLDER / "allreduce.py"), *options],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    number = r" +\d+\.\d{3} \|"
    for size in ("4 KiB", "64 KiB"):
        assert re.search(rf"^\| {size} +\|{number * 6}$", job.stdout, re.MULTILINE), job.stdout
    last = told(job, r"passed \d of 2")[0]
    (written,) = tmp_path.glob("*.md")
    assert written.read_text().strip().endswith(last)
