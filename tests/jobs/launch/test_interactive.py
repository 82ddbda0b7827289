"""`keras_dist.run` in a Jupyter kernel, in Python and in a terminal, and its errors."""

import contextlib
import io
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook
from rich.console import Console
from start_jobs import (
    HANG_SECONDS,
    in_a_terminal,
    is_alive,
    pids,
    run,
    wait_for,
    without_launcher,
)

import keras_dist
from keras_dist import errors
from keras_dist.launch.interactive import rank
from keras_dist.launch.interactive.outcome import Failure, JobFiles
from keras_dist.launch.interactive.view import View
from keras_dist.monitor.gpu import Gpu
from keras_dist.monitor.report import Report
from keras_dist.runtime import launch_environment

# --- In a Jupyter kernel

CELLS = [
    """
import os, signal, sys, threading, time
import keras_dist
handlers = [signal.getsignal(number) for number in range(1, 32)]
factor = 3
class Odd(Exception): pass
def times(number):
    return factor * number
def work(number, more=0):
    from mpi4py import MPI
    rank = MPI.COMM_WORLD.rank
    for step in range(3):
        print(f"\\r{step} of 3 on {rank}", end="", flush=True)
        time.sleep(0.4)
    print()
    return rank, times(number) + more, os.getpid(), os.environ.get("MPLBACKEND"), os.environ["WORD"]
""",
    """
values = keras_dist.run(work, (2,), {"more": 1}, np=2, env={"WORD": "hello"})
assert [value[:2] for value in values] == [(0, 7), (1, 7)], values
assert os.getpid() not in [value[2] for value in values]
assert [value[3:] for value in values] == [(None, "hello")] * 2, values
assert not {"mpi4py", "keras", "tensorflow"} & set(sys.modules)
""",
    """
def fail(flag):
    from mpi4py import MPI
    if MPI.COMM_WORLD.rank == 1:
        print("the last words")
        raise Odd("on one rank")
    MPI.COMM_WORLD.Barrier()
try:
    keras_dist.run(fail, (True,), verbose=False)
except keras_dist.errors.RankError as error:
    assert error.rank == 1 and isinstance(error.__cause__, Odd), error
    assert "[rank 1 of 2] Expected the function to return. Received: Odd: on one" in str(error)
    assert 'raise Odd("on one rank")' in error.traceback and "the last words" in str(error)
    print("raised here")
""",
    """
import pathlib, tempfile
with tempfile.TemporaryDirectory() as folder:
    def stay():
        (pathlib.Path(folder) / str(os.getpid())).touch()
        time.sleep(1000)
    def interrupt():
        while len(os.listdir(folder)) < 2:
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)  # as the kernel is interrupted
    threading.Thread(target=interrupt).start()
    try:
        keras_dist.run(stay, np=2)
    except KeyboardInterrupt:
        left = [pid for pid in os.listdir(folder) if os.path.exists(f"/proc/{pid}")]
        assert not left, left
        print("interrupted")
""",
    "assert handlers == [signal.getsignal(number) for number in range(1, 32)]",
    "keras_dist.run(lambda: 1 / 0, np=1)",
]


def test_from_a_notebook(tmp_path):
    book = new_notebook(cells=[new_code_cell(text) for text in CELLS])
    client = NotebookClient(
        book, timeout=HANG_SECONDS, resources={"metadata": {"path": str(tmp_path)}}
    )
    with pytest.raises(Exception, match="ZeroDivisionError: division by zero"):
        client.execute()
    table, *streams = book.cells[1].outputs
    assert table.output_type == "display_data"
    lines = table.data["text/plain"].splitlines()
    assert all(word in lines[0] for word in ("rank", "host", "pid", "state", "memory"))
    assert [line.split()[0] for line in lines[1:]] == ["0", "1"]
    assert all("returned" in line and "GiB" in line for line in lines[1:])
    printed = "".join(stream.text for stream in streams)
    assert printed == "\r0 of 3 on 0\r1 of 3 on 0\r2 of 3 on 0\n"
    assert len(streams) > 1  # unchanged
    assert book.cells[2].outputs[0].text == "raised here\n"
    assert book.cells[3].outputs[-1].text == "interrupted\n"
    assert book.cells[4].outputs == []
    assert book.cells[5].outputs[-1].ename == "RankError"


# --- In Python


@pytest.mark.slow
def test_with_the_other_library(open_mpi):
    text = """
import os, keras_dist
def work():
    from mpi4py import MPI
    return MPI.get_vendor()[0], MPI.COMM_WORLD.allreduce(MPI.COMM_WORLD.rank)
assert keras_dist.run(work, np=2) == [("Open MPI", 1)] * 2
def fail():
    from mpi4py import MPI
    if MPI.COMM_WORLD.rank == 1:
        raise ValueError("on one rank")
    MPI.COMM_WORLD.Barrier()
try:
    keras_dist.run(fail)
except keras_dist.errors.RankError as error:
    print(error.rank, repr(error.__cause__))
"""
    printed = run([open_mpi, "-c", text], env=without_launcher()).stdout
    assert printed == "1 ValueError('on one rank')\n"


def test_a_rank_that_fails_before_mpi_has_started_ends_all():
    def fail():
        if launch_environment.announced_rank() == 1:
            raise ValueError("early")
        time.sleep(1000)

    with pytest.raises(errors.RankError, match="ValueError: early") as raised:
        keras_dist.run(fail, verbose=False)
    assert raised.value.rank == 1


def test_a_rank_that_is_killed_is_told_with_its_last_words():
    def die():
        print("I was here", flush=True)
        if launch_environment.announced_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1000)

    with pytest.raises(errors.RankError, match=r"(?s)no value of 2 of them.*rank 1:\nI was here"):
        keras_dist.run(die, verbose=False)


def test_ranks_that_take_too_long_are_ended(tmp_path):
    def stay():
        (tmp_path / f"pid-{os.getpid()}").touch()
        time.sleep(1000)

    with pytest.raises(errors.RankError, match="to return within 2 s"):
        keras_dist.run(stay, timeout=2, verbose=False)
    assert not any(map(is_alive, pids(tmp_path)))


def test_an_interrupt_while_ranks_are_being_started_ends_them(tmp_path):
    text = """
import os, signal, time
import keras_dist
os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), signal.SIGINT))
try:
    keras_dist.run(time.sleep, (1000,), verbose=False, timeout=30)
except KeyboardInterrupt:
    print("interrupted")
"""
    ended = run([sys.executable, "-c", text], env={**os.environ, "TMPDIR": str(tmp_path)})
    assert ended.stdout == "interrupted\n"
    assert not list(tmp_path.iterdir())
    assert not started_in(tmp_path)


def started_in(folder):
    """Returns the processes whose command line names a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if str(folder).encode() in path.read_bytes():
                found.append(path.parent.name)
    return found


def test_ranks_end_when_their_caller_is_killed(tmp_path):
    text = """
import keras_dist
def stay():
    import os, pathlib, time
    pathlib.Path(f"pid-{os.getpid()}").touch()
    time.sleep(1000)
keras_dist.run(stay, verbose=False)
"""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}  # no process is left to remove it
    command = [sys.executable, "-c", text]
    with subprocess.Popen(command, cwd=tmp_path, env=environment) as caller:
        assert wait_for(lambda: len(pids(tmp_path)) == 2)
        ranks = pids(tmp_path)
        caller.kill()
    assert wait_for(lambda: not any(map(is_alive, ranks)))


def test_hosts_are_those_that_are_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # shared by all nodes: ranks and caller exchange files there
    values = keras_dist.run(os.listdir, (".",), num_proc=2, hosts="localhost:2", verbose=False)
    assert [name.startswith(".keras_dist-") for name in values[0]] == [True]
    assert values[0] == values[1]
    assert not list(tmp_path.iterdir())
    with pytest.raises(errors.LaunchError, match=r"have slots \(localhost:1\)"):
        keras_dist.run(print, hosts="localhost:1", verbose=False)


def test_the_table_shows_what_is_known_of_each_rank(tmp_path):
    exchange = JobFiles(tmp_path)
    speed = {"state": "fit", "steps": 64, "samples_per_second": 1234.5}
    device = Gpu("H200", 0.5, 3 * 2**30, 100)
    first = Report(0, "h1", 7, 0.0, memory_nbytes=2**30, step=3, gpu=device, **speed)
    exchange.put_report(0, first)
    exchange.put_outcome(1, Failure("ValueError", "", b"", False))
    console = Console(file=io.StringIO(), width=120)
    console.print(View(exchange, 3).table())
    head, *rows = (line.split() for line in console.file.getvalue().splitlines())
    assert head == "rank host pid state step samples/s memory GPU GPU memory".split()
    assert rows[0] == "0 h1 7 fit 3/64 1,234 1.00 GiB 50% 3.00 GiB".split()
    assert rows[1:] == [["1", "failed"], ["2", "starting"]]


def test_reports_go_on_after_an_error_of_the_file_system(monkeypatch):
    failures = iter([OSError("full"), OSError("full"), KeyboardInterrupt()])

    def report(exchange, of):
        raise next(failures)

    monkeypatch.setattr(rank, "_report", report)
    monkeypatch.setattr(rank, "REPORT_SECONDS", 0)
    with pytest.raises(KeyboardInterrupt):
        rank._report_periodically(None, 0)


def test_what_cannot_be_pickled_names_rank_and_type():
    with pytest.raises(errors.ArgumentTypeError, match=r"cannot pickle .*lock"):
        keras_dist.run(print, (threading.Lock(),))
    with pytest.raises(errors.RankError, match=r"\[rank 0\] .* an object of type generator"):
        keras_dist.run(lambda: (number for number in []), np=1, verbose=False)


@pytest.mark.parametrize(
    ("kind", "fn", "np", "env", "message"),
    [
        (errors.ArgumentError, print, 0, {}, "np to be 1 rank or more. Received: 0."),
        (errors.ArgumentTypeError, print, "2", {}, "np to be 1 rank or more. Received: '2'."),
        (errors.ArgumentTypeError, print(), 2, {}, "a function. Received: None."),
        (
            errors.LaunchError,
            print,
            2,
            {"MPI4PY_LIBMPI": "/nowhere/libmpi.so"},
            r"Expected an MPI library. Received: none.* pip install",
        ),
    ],
)
def test_wrong_arguments_are_refused(kind, fn, np, env, message):
    with pytest.raises(kind, match=message):
        keras_dist.run(fn, np=np, env=env, verbose=False)


def test_in_a_terminal_the_table_stands_below_the_output():
    text = """
import keras_dist
def work():
    import time
    print("first line")
    print("\\r1 of 2", end="", flush=True)
    time.sleep(1)
    print("\\r2 of 2")
print(keras_dist.run(work, np=2))
"""
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    printed = in_a_terminal([sys.executable, "-c", text], env=environment)
    lines = printed.splitlines()
    for text in ("first line", "1 of 2", "2 of 2", "starting", "returned"):
        assert any(text in line for line in lines), printed
    assert lines[-1].endswith("[None, None]")
