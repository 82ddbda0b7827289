"""`keras-dist export`: writes saved training as one file of Keras."""

import argparse
from typing import Any


def add_to(commands: Any) -> None:
    """Adds the command to the subparsers."""
    parser = commands.add_parser(
        "export",
        description="Writes the newest undamaged generation of "
        "keras_dist.callbacks.BackupAndRestore or ShardedCheckpoint as one .keras file, or its "
        "weights as a .weights.h5 file. KERAS_BACKEND selects the backend, as in a script.",
    )
    parser.set_defaults(act=_export)
    parser.add_argument("directory", help="directory of the generations")
    parser.add_argument("file", help="path of the new file, which ends in .keras or .weights.h5")
    parser.add_argument(
        "--generation", type=int, help="number of the generation (default: the newest)"
    )


def _export(options: argparse.Namespace) -> int:
    from keras_dist import checkpoints

    checkpoints.export(options.directory, options.file, generation=options.generation)
    return 0
