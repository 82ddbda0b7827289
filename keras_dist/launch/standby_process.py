"""The program of a process that stands by for a restart of the job, see decision 72."""

import contextlib
import fcntl
import importlib.util
import os
import queue
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from keras_dist import config
from keras_dist._compat.python import run_as_main
from keras_dist.launch.channel import HANDSHAKE_SECONDS, Channel, connected
from keras_dist.launch.rank_wrapper import let_go
from keras_dist.monitor.imports import imports_file, read_imports, remove_imports
from keras_dist.runtime import launch_environment

POLL_SECONDS = 0.5
NEEDED_NBYTES = 512 * 2**20  # by the imports of a process, at most
CGROUP = Path("/sys/fs/cgroup")


def main() -> None:
    """Waits, then runs the program."""
    held, count, *program = sys.argv[1:]
    outputs = [os.dup(stream) for stream in (1, 2)]
    channel = _connect()
    told: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    listen = threading.Thread(target=_listen, args=(channel, told), daemon=True)
    listen.start()
    _send_output_to([os.open(os.devnull, os.O_WRONLY)] * 2)
    notes = _notes(told)
    if notes is not None:
        with contextlib.suppress(OSError):  # `_listen` ends this process
            channel.send(event="noticed", steps=notes["steps"])
        problem = _lack_of_memory()
        if problem and launch_environment.announced_local_rank() == 0:
            os.write(outputs[1], f"keras-dist: a restart imports anew: {problem}\n".encode())
        notes = None if problem else notes
    words = program[int(count) :]
    if notes is not None:
        folder = "" if words[0] == "-m" else os.path.dirname(os.path.realpath(words[0]))
        sys.path[0:0] = [] if sys.flags.safe_path else [folder or os.getcwd()]
        _import(notes, told)
    message = told.get()
    listen.join()
    channel.close()
    _send_output_to(outputs)
    if held:
        let_go(held)
    os.environ.update(message["environment"])
    if notes is None:
        launch_environment.restore_threads()
        os.execvp(program[0], program)
    config.settings.cache_clear()
    sys.orig_argv[:] = program
    run_as_main(words)


def _connect() -> Channel:
    """Connects to the launcher; a process that does not reach it ends."""
    token, *addresses = config.settings().standby_server.split("@")
    announced = launch_environment.announced_size()
    me = {
        "rank": launch_environment.announced_rank(),
        "size": 1 if announced is None else announced.size,
        "restart": config.settings().restart,
    }
    for address in addresses:
        with contextlib.suppress(OSError):
            channel = Channel(connected(address, HANDSHAKE_SECONDS))
            if channel.introduce(token, me):
                return channel
    os._exit(0)


def _listen(channel: Channel, told: "queue.SimpleQueue[dict[str, Any]]") -> None:
    """Waits for the word of the launcher; ends this process with the connection."""
    message = None
    with contextlib.suppress(OSError):
        message = channel.receive()
    if message is None:
        if launch_environment.announced_local_rank() == 0:
            remove_imports()
        os._exit(0)
    told.put(message)


def _send_output_to(files: list[int]) -> None:
    for stream, file in zip((1, 2), files, strict=True):
        os.dup2(file, stream)
    for file in set(files):
        os.close(file)


def _notes(told: "queue.SimpleQueue[Any]") -> dict[str, Any] | None:
    """Waits until the job has told its imports; returns `None` if this process must go before."""
    while told.empty():
        notes = read_imports(config.settings().restart - 1)
        if notes is not None:
            return notes
        time.sleep(POLL_SECONDS)
    return None


def _import(notes: dict[str, Any], told: "queue.SimpleQueue[Any]") -> None:
    """Imports the same files with the variables that the program sets before."""
    for name, text in notes["environment"].items():
        if text is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = text
    # One process of a node after the other: the job needs the cores meanwhile.
    with _turn(imports_file(), told):
        for name, origin in notes["modules"]:
            with contextlib.suppress(Exception, SystemExit):
                found = importlib.util.find_spec(name)
                if found is not None and found.origin == origin:
                    importlib.import_module(name)
        if notes["mpi"]:
            from keras_dist import _engine

            _engine.library.load_mpi()  # does not initialize it


@contextlib.contextmanager
def _turn(path: Path | None, told: "queue.SimpleQueue[Any]") -> Iterator[None]:
    """Makes other processes of this node wait with their imports, until they must go."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # no file: the job has ended
            file = stack.enter_context((path or Path(os.devnull)).open())
            while told.empty() and not _is_locked(file):
                time.sleep(POLL_SECONDS / 5)
        yield


def _is_locked(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _lack_of_memory() -> str:
    """Returns why this node cannot hold the imports of its processes; empty if it can."""
    free = [_number("/proc/meminfo", "MemAvailable:") * 1024]
    with contextlib.suppress(OSError, ValueError):  # no limit, or another version of cgroups
        limit = int((CGROUP / "memory.max").read_text())
        used = int((CGROUP / "memory.current").read_text())
        free.append(limit - used + _number(f"{CGROUP}/memory.stat", "inactive_file"))
    needed = launch_environment.announced_local_size() * NEEDED_NBYTES
    if min(free) >= needed:
        return ""
    host = os.uname().nodename
    return f"{min(free) >> 20} MiB of memory are free on {host}, less than {needed >> 20}."


def _number(path: str, name: str) -> int:
    """Returns the number behind a name in a file of the kernel; 0 if there is none."""
    lines = Path(path).read_text().splitlines() if os.path.exists(path) else []
    return next((int(line.split()[1]) for line in lines if line.startswith(name)), 0)
