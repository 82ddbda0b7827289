"""`keras-dist export`: writes a sharded checkpoint as one file of Keras."""

import argparse
from typing import Any


def add_to(commands: Any) -> None:
    """Adds the command to the subparsers."""
    parser = commands.add_parser(
        "export",
        description="Writes the newest whole generation of a checkpoint of "
        "keras_dist.callbacks.ShardedCheckpoint as one .keras file. KERAS_BACKEND selects the "
        "backend, as in a script.",
    )
    parser.set_defaults(act=_export)
    parser.add_argument("directory", help="directory of the checkpoint")
    parser.add_argument("file", help="path of the new file, which ends in .keras")


def _export(options: argparse.Namespace) -> int:
    from keras_dist import checkpoints

    checkpoints.export(options.directory, options.file)
    return 0
