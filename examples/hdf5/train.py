"""Learns the ground state energy of an electron from the potential it is in, from an HDF5 file.

    keras-dist run -np 2 python examples/hdf5/train.py

The file is made first, 2 GB of it. Then the same training reads it in three ways, and a table
compares how fast each hands out rows by itself and in training.
"""

import argparse
import tempfile
import time
from pathlib import Path

import keras
from potentials import GRID, make_file

import keras_dist

WAYS = {
    "every rank its rows": {},
    "through MPI-IO": {"mpi_io": "independent"},
    "one rank for all": {"readers": 1},
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=float, default=2.0, help="of the file, GB")
    parser.add_argument("--file", type=Path, help="where it is, or will be made and kept")
    parser.add_argument("--batch-size", type=int, default=256, help="rows per rank and step")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--lr", type=float, default=0.01, help="learning rate")
    args = parser.parse_args()

    keras_dist.init()
    keras.utils.set_random_seed(42)
    with tempfile.TemporaryDirectory() as folder:
        # The nodes must see the same file; a temporary one serves the ranks of one node.
        path = keras_dist.broadcast_object(args.file or Path(folder) / "potentials.h5")
        if keras_dist.rank() == 0 and not path.exists():
            print(f"making {path}, {args.size:g} GB ...", flush=True)
            make_file(path, args.size)
        keras_dist.barrier()
        model = make_network()
        # Without a memory of its own the optimizer begins anew with the weights.
        optimizer = keras.optimizers.SGD(args.lr)
        model.compile(keras_dist.DistributedOptimizer(optimizer), "mse")
        found = [(way, *measure(model, path, args, options)) for way, options in WAYS.items()]
        keras_dist.barrier()  # or rank 0 would remove the file too early
    if keras_dist.rank() == 0:
        report(found)


def measure(model, path, args, options):
    """Returns rows/s of all ranks when they are only read, and in training, and the loss."""
    train = keras_dist.data.hdf5(
        path, x="potential", y="energy", batch_size=args.batch_size, **options
    )
    rows = 0
    keras_dist.barrier()
    start = time.perf_counter()
    for potential, _ in batches_of(train):
        rows += len(potential)
    keras_dist.barrier()
    alone = keras_dist.allreduce(rows, op="sum") / (time.perf_counter() - start)

    weights = model.get_weights()
    model.fit(train, steps_per_epoch=1, verbose=0)  # compiles
    model.set_weights(weights)
    start = time.perf_counter()
    history = model.fit(train, epochs=args.epochs, callbacks=keras_dist.callbacks(), verbose=0)
    seconds = time.perf_counter() - start
    keras_dist.verify_replicas(model)
    model.set_weights(weights)
    total = keras_dist.allreduce(rows, op="sum") * args.epochs
    return alone, total / seconds, history.history["loss"][-1]


def batches_of(train):
    """Returns one epoch of what `hdf5` has given, on each backend."""
    if isinstance(train, keras.utils.PyDataset):
        return (train[step] for step in range(len(train)))
    return train


def make_network():
    """A small convolutional network from a potential on a line to a number."""
    return keras.Sequential(
        [
            keras.Input((GRID,)),
            keras.layers.Reshape((GRID, 1)),
            keras.layers.Conv1D(16, 9, strides=4, activation="relu"),
            keras.layers.Conv1D(32, 9, strides=4, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(1),
        ]
    )


def report(found):
    """Prints the table."""
    ranks = f"{keras_dist.size()} rank{'s' if keras_dist.size() > 1 else ''}"
    print(f"\nrows/s of {ranks}        |  read alone | in training |   loss")
    for way, alone, training, loss in found:
        print(f"{way:<24} | {alone:11,.0f} | {training:11,.0f} | {loss:.4f}")
    print("\nAll ways have read the same rows, and all replicas are equal.")


if __name__ == "__main__":
    main()
