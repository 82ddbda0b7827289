"""The program that MPI spawns to replace a rank: it initializes MPI and runs the rank's script.

    python -m keras_dist.launch.newcomer DIRECTORY FOLDER PROGRAM

DIRECTORY is that of the job, FOLDER the current directory of the others, and PROGRAM what they run,
as JSON, see `runtime.replacement`.
"""

import json
import os
import runpy
import sys
from typing import Any

from keras_dist import _engine, config, errors
from keras_dist.runtime import exit_hooks, replacement
from keras_dist.runtime.job_directory import JobDirectory


def main() -> None:
    """Joins MPI, then runs the program."""
    directory, folder, text = sys.argv[1:]
    os.chdir(folder)
    os.environ.update(KERAS_DIST_JOINS="1", KERAS_DIST_JOIN_DIRECTORY=directory)
    config.settings.cache_clear()
    mpi = _engine.library.load_mpi()
    if mpi is None:
        raise SystemExit(_engine.library.mpi_failure())
    _engine.library.start_mpi(mpi)
    replacement.set_parent(mpi.Comm.Get_parent())
    exit_hooks.install()
    # A text runs in this module, as that of `python -c` in its own, and may assign to its names.
    failure, find_job, pending, leave = (
        errors.LaunchError,
        JobDirectory(directory).job,
        replacement.is_pending,
        replacement.leave,
    )
    try:
        _run(json.loads(text), folder)
    except failure:
        if find_job() is None and pending():
            leave()  # the job has ended without this process, which is no error
        raise


def _run(program: dict[str, Any], folder: str) -> None:
    """Runs a program as `__main__`."""
    sys.argv[:] = program["arguments"]
    if "module" in program:
        sys.path[0:0] = [folder]
        runpy.run_module(program["module"], run_name="__main__", alter_sys=True)
    elif "text" in program:
        sys.path[0:0] = [""]
        exec(compile(program["text"], "<string>", "exec"), sys.modules["__main__"].__dict__)
    else:
        sys.path[0:0] = [os.path.dirname(program["file"])]
        runpy.run_path(program["file"], run_name="__main__")


if __name__ == "__main__":
    main()
