"""The command `keras-dist`. Imports no framework."""

import argparse
import contextlib
import importlib
import os
import signal
import sys
from collections.abc import Sequence

from keras_dist import config, errors
from keras_dist._version import __version__

__all__ = ["main"]

USAGE = 2  # as argparse ends
# The module of a command is imported when it is called, so that --help is fast.
COMMANDS = {
    "bench": "measure the cost of gradient reductions",
    "checkpoint": "list the generations of saved training, and check that they are whole",
    "doctor": "check whether jobs can run here, with remedies",
    "export": "write saved training as one file of Keras",
    "migrate": "convert a Horovod script",
    "run": "start a job, and restart it after a failure",
    "run-notebook": "run a notebook on all ranks",
    "timeline": "summarize the time of a job from its timeline",
    "top": "watch running jobs",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="keras-dist", description="Keras training on many ranks.")
    parser.add_argument("--version", action="version", version=f"keras_dist {__version__}")
    words = sys.argv[1:] if arguments is None else list(arguments)
    if words[:1] == ["join"]:
        parser.error(f"ranks do not join a job that runs. {config.START_AGAIN}")
    commands = parser.add_subparsers(required=True)
    for name, meaning in COMMANDS.items():
        if words[:1] == [name]:
            module = "checkpoint" if name == "export" else name.replace("-", "_")
            importlib.import_module(f"keras_dist.launch.cli.{module}").add_to(commands, name)
        else:
            commands.add_parser(name, help=meaning)
    options = parser.parse_args(words, argparse.Namespace(words=words[1:]))
    try:
        return options.act(options)
    except errors.KerasDistError as error:
        with contextlib.suppress(BrokenPipeError):  # nobody reads it
            print(f"keras-dist: {error}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:  # while no job is running
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the reader of the output has seen enough, such as `head`
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())  # for the last flush of Python
        return 128 + signal.SIGPIPE
