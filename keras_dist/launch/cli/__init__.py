"""`keras-dist`: what to ask on the command line. Imports no framework."""

import argparse
import importlib
import signal
import sys
from collections.abc import Sequence

from keras_dist import errors
from keras_dist._version import __version__

__all__ = ["main"]

USAGE = 2  # as argparse ends
# Each is a module of its name, which is imported when it is called: --help takes no time.
COMMANDS = {
    "bench": "measure what reducing gradients costs here, and for a model",
    "doctor": "say whether jobs can run here, and what to do where they cannot",
    "migrate": "show what a script for Horovod has to become",
    "run": "start a job, and start it anew when it fails",
    "run-notebook": "run a notebook on all ranks",
    "timeline": "say where the time of a job went",
    "top": "watch jobs as they run",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        arguments: the words after the program's name. Defaults to those it was called with.

    Returns:
        The exit code: that of the job for `run`; 0 when all is well, 1 when something is missing
        for `doctor`, no job is there for `top` and changes are proposed by `migrate`; 2 when the
        command line, or a file that it names, makes no sense; 3 when `migrate` leaves lines to the
        user.
    """
    parser = argparse.ArgumentParser(prog="keras-dist", description="Keras training on many ranks.")
    parser.add_argument("--version", action="version", version=f"keras_dist {__version__}")
    words = sys.argv[1:] if arguments is None else list(arguments)
    commands = parser.add_subparsers(required=True)
    for name, meaning in COMMANDS.items():
        if words[:1] == [name]:
            importlib.import_module(f"keras_dist.launch.cli.{name.replace('-', '_')}").add_to(
                commands
            )
        else:
            commands.add_parser(name, help=meaning)
    options = parser.parse_args(words, argparse.Namespace(words=words[1:]))
    try:
        return options.act(options)
    except errors.KerasDistError as error:
        print(f"keras-dist: {error}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:  # while no job is running
        return 128 + signal.SIGINT
