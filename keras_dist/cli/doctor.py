"""`keras-dist doctor`: which Python, MPI library and launcher belong together."""

import argparse
import sys
from typing import Any

from keras_dist import errors
from keras_dist._version import __version__
from keras_dist.cli.mpiexec import find_mpiexec, load_library

__all__ = ["add_to"]


def add_to(commands: Any) -> None:
    """Adds the command to the subparsers of the command line."""
    parser = commands.add_parser("doctor", help="say which MPI is used and how to start a job")
    parser.set_defaults(act=_tell)


def _tell(options: argparse.Namespace) -> int:
    """Prints what was found; returns 0 when there is an MPI library and a launcher, else 1."""
    print(f"keras_dist   {__version__}")
    print(f"Python       {sys.version.split()[0]} ({sys.executable})")
    try:
        library = load_library()
        print(f"MPI library  {library.text}")
        print(f"Launcher     {find_mpiexec(library)}")
    except errors.LaunchError as error:
        print(f"Trouble      {error}")
        return 1
    print("Start a job  keras-dist run -np 2 python train.py")
    return 0
