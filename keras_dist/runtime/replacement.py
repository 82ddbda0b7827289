"""Replacement of a rank that has died: MPI spawns a process, which runs the script and joins.

The process initializes MPI at once, so that the others wait for it shortly, and go on. It joins
when it comes to its training, see `growth`. Open MPI 5 does not survive the death of a process that
it has spawned, before or after it has joined, and spawns on the same node only.
"""

import contextlib
import json
import os
import sys
from typing import Any, NoReturn

from keras_dist import _engine
from keras_dist.runtime import job
from keras_dist.runtime.job_directory import is_alive

PROGRAM = ("-P", "-m", "keras_dist.launch.newcomer")

# Intercommunicator to a process that was spawned and has not joined yet, or to those that spawned
# this process; its process id, on the root.
_pending: Any = None
_pid: int | None = None


def spawn(directory: str) -> str | None:
    """Spawns a process that replaces a rank. Collective: every rank of the job; blocks.

    Returns:
        Why no process was spawned; `None` if one was.
    """
    global _pending, _pid
    comm = job.communicator()
    if not comm.is_one_node:
        return "the ranks are on several nodes, where Open MPI spawns no process"
    arguments = [*PROGRAM, directory, os.getcwd(), json.dumps(_program())]
    try:
        _pending = comm.world.Spawn(sys.executable, args=arguments, maxprocs=1, root=0)
    except comm.mpi.Exception as error:
        return str(error)
    if comm.rank == 0:
        _pid = _pending.recv(source=0)
    return None


def set_parent(parent: Any) -> None:
    """Makes this process one that was spawned, and tells its process id."""
    global _pending
    _pending = parent
    parent.send(os.getpid(), dest=0)


def is_spawned() -> bool:
    """Returns whether this process was spawned and has not joined yet."""
    return job.joins_as() is not None and _pending is not None


def is_pending() -> bool:
    """Returns whether a process was spawned that has not joined yet."""
    return _pending is not None


def is_lost() -> bool:
    """Returns, on the root, whether that process has died."""
    return _pid is not None and not is_alive(_pid)


def merge() -> Any:
    """Returns the communicator of all, the new rank last. Collective: the ranks and the process."""
    global _pending, _pid
    merged = _pending.Merge(high=is_spawned())
    # Otherwise MPI_Finalize would look for ranks that have died.
    merged.Barrier()
    _pending.Disconnect()
    _pending = _pid = None
    return merged


def forget() -> None:
    """Disconnects from a process that has not joined in time; blocks until it knows or has died."""
    global _pending, _pid
    if _pending is not None:
        # Open MPI cannot disconnect from a process that has died.
        mpi: Any = _engine.library.load_mpi()
        with contextlib.suppress(mpi.Exception):
            _pending.Disconnect()
        _pending = _pid = None


def leave() -> NoReturn:
    """Ends this spawned process, without which the job has ended."""
    forget()
    sys.exit(0)


def _program() -> dict[str, Any]:
    """Returns what this process runs: a module, a text or a file, and its arguments."""
    main: Any = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return {"module": spec.name.removesuffix(".__main__"), "arguments": sys.argv}
    if sys.argv[:1] == ["-c"]:
        text = sys.orig_argv[sys.orig_argv.index("-c") + 1]
        return {"text": text, "arguments": sys.argv}
    return {"file": os.path.abspath(sys.argv[0]), "arguments": sys.argv}
