"""`keras-dist join`: starts a process that joins a running job."""

import argparse
import os
from pathlib import Path
from typing import Any

from keras_dist import errors
from keras_dist.launch.cli.mpiexec import find_mpiexec, load_library
from keras_dist.launch.cli.program import add_program, program_of
from keras_dist.storage.ownership import make_private_directory


def add_to(commands: Any) -> None:
    """Adds the command to the subparsers."""
    parser = commands.add_parser(
        "join",
        description="Starts a process that joins a running job as a further rank, when it comes to "
        "its fit. The program is that of the job, with the same arguments.",
        usage="keras-dist join DIRECTORY (python train.py | train.py | -m module) ...",
        allow_abbrev=False,
    )
    parser.set_defaults(act=_join)
    parser.add_argument("directory", help="the --join-directory of the job")
    add_program(parser)


def _join(options: argparse.Namespace) -> int:
    words = program_of(options, "join DIRECTORY")
    library = load_library()
    if library.is_open_mpi:
        raise errors.LaunchError(
            "[keras-dist join]",
            "an MPI library that connects processes of different jobs, such as MPICH",
            library.text,
            "Install keras_dist[mpich] for the job and for this process.",
        )
    directory = os.path.abspath(options.directory)
    make_private_directory(Path(directory), "[keras-dist join]")
    os.environ.update(KERAS_DIST_JOIN_DIRECTORY=directory, KERAS_DIST_JOINS="1")
    # MPICH takes two processes without mpiexec for the same one.
    command = [find_mpiexec(library), "-n", "1", *words]
    os.execvp(command[0], command)
