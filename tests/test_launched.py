"""What `keras-dist run` makes of its ranks: whose line is whose, and which cores."""

import os
import subprocess
import sys

from jobs import BARE

PRINTING = r"""
import os, sys
rank = os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK"))
for step in range(3):
    sys.stdout.write(f"\b\b\r{rank} at {step}")
    sys.stdout.flush()
print("\nthreads", os.environ["OMP_NUM_THREADS"], os.environ.get("TF_NUM_INTRAOP_THREADS"))
print("cores", len(os.sched_getaffinity(0)), os.environ["WORDS"], file=sys.stderr)
print("the end", end="")
"""


def start(*words, **options):
    """Runs the command line in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "keras_dist.cli", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=60,
        **options,
    )


def test_output_is_marked_and_kept(tmp_path):
    (tmp_path / "print.py").write_text(PRINTING)
    odd = "a;b,c 'd' $(e) `f`"
    options = ["-H", "localhost:2", "--bind", "cores", "--log-dir", "logs", "-x", f"WORDS={odd}"]
    job = start("run", *options, "print.py", cwd=tmp_path)
    printed = job.stdout.decode()
    assert job.returncode == 0, printed
    cores = max(1, len(os.sched_getaffinity(0)) // 2)
    for rank, mark in enumerate(["", "[1] "]):
        lines = [f"{rank} at 2", f"threads {cores} None", f"cores {cores} {odd}", "the end"]
        assert {mark + line for line in lines} <= set(printed.splitlines()), printed
        log = (tmp_path / "logs" / f"rank-{rank}.log").read_bytes().decode()
        assert f"\b\b\r{rank} at 1\b\b\r{rank} at 2\n" in log
        assert f"cores {cores} {odd}\n" in log


def test_the_last_words_of_a_rank_are_told_once_and_marked(tmp_path):
    text = f"""{BARE}
from keras_dist import collectives
runtime.init()
if runtime.rank() == 1:
    raise ValueError("too much")
collectives.barrier()
"""
    (tmp_path / "fails.py").write_text(text)
    job = start("run", "-np", "2", "fails.py", cwd=tmp_path)
    assert job.returncode == 1
    assert b"\n[1] ValueError: too much\n" in job.stdout
