"""`keras-dist`: what to ask on the command line. Imports no framework."""

import argparse
import os
import sys
from collections.abc import Sequence

from keras_dist._version import __version__

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        arguments: the words after the program's name. Defaults to those it was called with.

    Returns:
        The exit code: 0 when all is well, 1 when something is missing.
    """
    parser = argparse.ArgumentParser(prog="keras-dist", description="Keras training on many ranks.")
    parser.add_argument("--version", action="version", version=f"keras_dist {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="say which MPI is used and how to start a job with it")
    parser.parse_args(arguments)
    return _doctor()


def _doctor() -> int:
    """Prints the Python, the MPI library and the launcher that belong together.

    Returns:
        0 when an MPI library was found, else 1.
    """
    print(f"keras_dist   {__version__}")
    print(f"Python       {sys.version.split()[0]} ({sys.executable})")
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        print(f"MPI library  none: {str(error).splitlines()[0]}")
        print("Remedy       pip install 'keras_dist[mpich]', or load the cluster's MPI module.")
        return 1
    version = " ".join(MPI.Get_library_version().replace("\0", "").split()[:5])
    print(f"MPI library  {version}")
    mpiexec = os.path.join(os.path.dirname(sys.executable), "mpiexec")
    if os.path.exists(mpiexec):
        print(f"Start a job  {mpiexec} -n 2 {sys.executable} train.py")
    else:
        print("Start a job  with the mpiexec that was installed with this MPI library")
    return 0
