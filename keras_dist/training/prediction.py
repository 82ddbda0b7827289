"""`predict`: the outputs of a model for a whole data set, computed by all ranks."""

from typing import Any

import keras
import numpy as np

from keras_dist import _engine, errors, ops, runtime
from keras_dist.data import epochs
from keras_dist.data.gathering import Turns, gather, in_order, in_turn, indices_of
from keras_dist.data.nested import is_tf_dataset
from keras_dist.data.shard_options import ShardOptions
from keras_dist.runtime.process_sets import ProcessSet


def predict(
    model: keras.Model,
    data: Any,
    batch_size: int | None = None,
    *,
    verbose: str | int = "auto",
    steps: int | None = None,
    root_only: bool = False,
    process_set: ProcessSet | None = None,
) -> Any:
    """Returns what `model.predict` returns in one process; each rank computes a part.

    Batch `i` is computed by rank `i % size`. The result has every sample once, in the order of the
    data set, whatever the number of batches.

    Collective: every rank, with the same model and data; blocks.

    Args:
        model: the model, with the same weights on every rank.
        data: the whole data set on every rank, as for `model.predict`: arrays, alone or nested; a
            `tf.data.Dataset` of batches, a `PyDataset`, a torch `DataLoader`, a generator, or a
            function that returns one. Or what `shard` made of samples with `shuffle=False`.
        batch_size: number of samples of a batch, for arrays. Defaults to 32.
        verbose: as for `model.predict`; rank 0 shows the progress of its own batches. Defaults to
            `"auto"`.
        steps: number of batches of all ranks together. Defaults to all.
        root_only: whether only rank 0 needs the result; the other ranks then hold only what they
            computed. Defaults to `False`.
        process_set: the ranks. Defaults to all.

    Returns:
        Numpy arrays in the structure of the model's outputs. With `root_only`, `None` on ranks
        other than the first.

    Raises:
        DataError: there is no batch, the order of the data differs from rank to rank, ranks of a
            host cache in one file, or a rank failed; raised on every rank.
        ArgumentError: data of batches has a `batch_size`.

    Example:
    ```python
    outputs = keras_dist.predict(model, x_test, batch_size=64)
    ```
    """
    comm = runtime.communicator(process_set)
    shown: Any = (1 if verbose == "auto" else verbose) if comm.rank == 0 else 0
    if epochs.is_sharded(data):
        indices_of(data)  # raises if the rows have no order
        return gather(model.predict(data, verbose=shown), data, root_only=root_only)
    if callable(data) and not hasattr(data, "__iter__"):
        with _engine.collectives.raise_on_all(comm, "predict"):
            data = data()  # a tf.data.Dataset of a function is examined as one that is passed
    rows: list[np.ndarray] = []
    failure = None
    try:
        if is_tf_dataset(data):
            data = _with_own_caches(data, process_set)
        turns = in_turn(data, batch_size, steps, comm.rank, comm.size)
        results = _outputs(model, turns, shown)
        # Here, as batches of one rank alone may have outputs of several shapes.
        rows = _joined(results)
        report = _report(results)
    except Exception as error:  # raised once the other ranks know of it
        failure = error
        report = f"{type(failure).__name__}: {failure}", None, None, []
    reports = ops.allgather_object(report, process_set=process_set)
    if failure is not None:
        raise failure
    _check(reports)
    like, specs = next((like, specs) for _, like, specs, _ in reports if specs is not None)
    rows = rows or [np.empty((0, *shape), dtype) for shape, dtype in specs]
    order = _order([counts for *_, counts in reports])
    whole = in_order(rows, order, root_only, process_set)
    return None if whole is None else keras.tree.pack_sequence_as(like, whole)


def _with_own_caches(data: Any, process_set: ProcessSet | None) -> Any:
    """Returns a `tf.data.Dataset` whose cache files no other rank writes. Collective; blocks."""
    from keras_dist.data import tf_order

    held = ops.allgather_object(tf_order.held_files(data), process_set=process_set)
    with runtime.fit_within(process_set):
        return tf_order.with_own_caches(data, held, ShardOptions())


def _outputs(model: keras.Model, turns: Turns, verbose: int) -> list[Any]:
    """Returns the outputs for each batch, nested numpy arrays."""
    bar = keras.utils.Progbar(turns.total, verbose=verbose, unit_name="step")
    results = []
    for batch in turns.batches:
        outputs = model.predict_on_batch(batch)
        results.append(keras.tree.map_structure(np.asarray, outputs))
        bar.update(len(results))
    if turns.total is None:
        bar.update(len(results), finalize=True)
    return results


# Error, structure, shape and dtype of a row of each output, number of rows of each batch.
_Report = tuple[str | None, Any, Any, list[int]]


def _joined(results: list[Any]) -> list[np.ndarray]:
    """Returns the rows of each output of this rank; an empty list without results."""
    each = zip(*map(keras.tree.flatten, results), strict=True)
    return [np.concatenate(leaves) for leaves in each]


def _report(results: list[Any]) -> _Report:
    if not results:
        return None, None, None, []
    flat = keras.tree.flatten(results[0])
    specs = [(leaf.shape[1:], leaf.dtype) for leaf in flat]
    like = keras.tree.map_structure(lambda _: 0, results[0])
    return None, like, specs, [len(keras.tree.flatten(result)[0]) for result in results]


def _check(reports: list[_Report]) -> None:
    """Checks that no rank failed, and that there are predictions."""
    expected = "predictions for all data"
    for rank, (text, *_) in enumerate(reports):
        if text is not None:
            where, remedy = f"[rank {rank} of {len(reports)}]", "See the traceback of that rank."
            raise errors.DataError(where, expected, text, remedy)
    if all(specs is None for _, _, specs, _ in reports):
        raise errors.DataError(expected, "data without a batch", "Pass more data.")


def _order(counts: list[list[int]]) -> np.ndarray:
    """Returns the indices that put rows, from rank to rank, in the order of the batches."""
    size = len(counts)
    batches = [
        np.repeat(np.arange(rank, len(rows) * size + rank, size), rows)
        for rank, rows in enumerate(counts)
    ]
    return np.argsort(np.concatenate(batches), kind="stable")
