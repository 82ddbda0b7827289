"""The benchmarks run and say what they found; how fast anything is depends on the machine."""

import re
import subprocess
import sys
from pathlib import Path

ALLREDUCE = Path(__file__).parents[1] / "benchmarks" / "allreduce.py"


def test_allreduce(tmp_path):
    options = ["--quick", "--ranks", "2", "--sizes", "4096", "65536", "--output", str(tmp_path)]
    job = subprocess.run(
        [sys.executable, str(ALLREDUCE), *options],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert job.returncode == 0, job.stdout
    number = r" +\d+\.\d{3} \|"
    for size in ("4 KiB", "64 KiB"):
        assert re.search(rf"^\| {size} +\|{number * 6}$", job.stdout, re.MULTILINE), job.stdout
    last = job.stdout.strip().splitlines()[-1]
    assert re.fullmatch(r"passed \d of 2", last), job.stdout
    (written,) = tmp_path.glob("*.md")
    assert written.read_text().strip().endswith(last)
