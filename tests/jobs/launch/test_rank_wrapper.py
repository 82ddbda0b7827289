"""The rank wrapper of `keras-dist run`: output prefixes and core binding."""

import os
import re

import pytest
from start_jobs import BARE, RUN, in_a_terminal, keras_dist

from keras_dist.launch import rank_wrapper

pytestmark = pytest.mark.short

PRINTING = r"""
import os, sys
rank = os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK"))
for step in range(3):
    sys.stdout.write(f"\b\b\r{rank} at {step}")
    sys.stdout.flush()
print("\nthreads", os.environ["OMP_NUM_THREADS"], os.environ.get("TF_NUM_INTRAOP_THREADS"))
print("cores", len(os.sched_getaffinity(0)), os.environ["WORDS"], sys.argv[1], file=sys.stderr)
print("the end", end="")
"""


def test_output_is_marked_and_kept(tmp_path):
    (tmp_path / "print.py").write_text(PRINTING)
    odd = "a;b,c 'd' $(e) `f`"
    options = ["-H", "localhost:2", "--bind", "cores", "--log-dir", "logs", "-x", f"WORDS={odd}"]
    job = keras_dist("run", *options, "print.py", odd, cwd=tmp_path)
    printed = job.stdout
    assert job.returncode == 0, printed
    cores = max(1, len(os.sched_getaffinity(0)) // 2)
    for rank, mark in enumerate(["", "[1] "]):
        lines = [f"{rank} at 2", f"threads {cores} None", f"cores {cores} {odd} {odd}", "the end"]
        assert {mark + line for line in lines} <= set(printed.splitlines()), printed
        log = (tmp_path / "logs" / f"rank-{rank}.log").read_bytes().decode()
        assert f"\b\b\r{rank} at 1\b\b\r{rank} at 2\n" in log
        assert f"cores {cores} {odd} {odd}\n" in log


def test_the_last_words_of_a_rank_are_told_once_and_marked(tmp_path):
    text = f"""{BARE}
from keras_dist import ops
runtime.init()
if runtime.rank() == 1:
    raise ValueError("too much")
ops.barrier()
"""
    (tmp_path / "fails.py").write_text(text)
    job = keras_dist("run", "-np", "2", "fails.py", cwd=tmp_path)
    assert job.returncode == 1
    assert "\n[1] ValueError: too much\n" in job.stdout


def test_a_log_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    options = ["-np", "2", "--max-restarts", "1", "--log-dir", "file"]
    job = keras_dist("run", *options, "true", cwd=tmp_path)
    assert job.returncode == 2
    printed = job.stdout
    place = f"keras-dist: --log-dir {tmp_path / 'file'}, for rank"
    assert re.search(rf"{re.escape(place)} [01] on {os.uname().nodename}: File exists\n", printed)
    assert "Traceback" not in printed


BARS = """
import os, sys, time
rank = int(os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")))
time.sleep(0.3 * rank)
for step in range(3):
    print(f"\\r{rank} at {step}", end="" if step < 2 else "\\n", flush=True)
    time.sleep(0.2 * (1 - rank))
"""


def test_in_a_terminal_the_bar_of_the_root_is_live(tmp_path):
    (tmp_path / "bars.py").write_text(BARS)
    printed = in_a_terminal([*RUN, "-np", "2", "bars.py"], cwd=tmp_path)
    assert "\r0 at 0" in printed
    assert "\r\x1b[K[1] 1 at 2" in printed
    assert "1 at 1" not in printed


@pytest.fixture
def stream(tmp_path):
    """A function that returns what is printed for chunks of output of rank 1."""
    with open(tmp_path / "out", "w+b", buffering=0) as file:
        passed_on = rank_wrapper._Stream(file.fileno(), b"[1] ", live=False, log=None)

        def run(*chunks):
            begin = file.tell()
            for chunk in chunks:
                passed_on.take(chunk)
                passed_on.flush_stale_line()
            file.seek(begin)
            return file.read()

        yield run


def test_lines_are_whole_and_as_a_terminal_shows_them_in_the_end(stream):
    assert stream(b"a\nb", b"c\r\nd\r") == b"[1] a\n[1] bc\n"
    assert stream(b"e\rf \xc3", b"\xa4\n[1] g\n\n") == "[1] f ä\n[1] g\n[1] \n".encode()
    assert stream(b"the end", b"") == b"[1] the end\n"


def test_a_line_that_does_not_end_is_shown_after_a_while(stream, monkeypatch):
    assert stream(b"1/9\r2/9") == b""
    monkeypatch.setattr(rank_wrapper, "PATIENCE_SECONDS", 0.0)
    assert stream(b"\r3/9") == b"[1] 3/9\n"
    monkeypatch.setattr(rank_wrapper, "PATIENCE_SECONDS", 10.0)
    assert stream(b"x" * (rank_wrapper.CHUNK_NBYTES + 1)) == b"[1] " + b"x" * 65537 + b"\n"
    assert stream(b"y\r" * rank_wrapper.CHUNK_NBYTES) == b""
