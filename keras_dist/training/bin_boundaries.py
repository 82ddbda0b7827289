"""Boundaries of bins from the data of all ranks, for `Discretization`.

Keras summarizes an array by values at equal distances in its sorted elements, and merges summaries
of batches. The ranks select these values of the joined array without exchanging it.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from keras_dist import _engine
from keras_dist._compat.keras.summaries import places_of
from keras_dist.ops.bucket_size import bucket_nbytes
from keras_dist.training.adapt_errors import on_every_rank, refused
from keras_dist.training.moments import as_numpy, is_array

SIGN = np.uint32(1 << 31)


def adapt_bins(layer: Any, data: Any, options: dict[str, Any], comm: _engine.Communicator) -> None:
    """Adapts a `Discretization`. Collective: every rank; blocks. See `adapt`."""
    with on_every_rank(comm, layer):
        if layer.num_bins is None or options.keys() - {"steps"}:
            unknown = sorted(options.keys() - {"steps"})
            received = f"options {unknown}" if unknown else "one made with bin_boundaries="
            raise refused(
                layer, "a Discretization with num_bins, and no options but steps", received
            )
        if isinstance(data, list | tuple) and all(np.ndim(value) == 0 for value in data):
            data = np.asarray(data) if data else None  # numbers
        kind = None if data is None else "one array" if is_array(data) else "batches"
    kinds = _engine.collectives.allgather_object(comm, kind, operation="the kind of data")
    if len(set(kinds) - {None}) > 1:
        raise refused(layer, "data of the same kind on all ranks", ", ".join(map(str, kinds)))
    adapt_all = _adapt_array if "one array" in kinds else _adapt_batches
    layer.reset_state()
    if not adapt_all(layer, data, options.get("steps"), comm):
        raise refused(layer, "data on a rank", "none on any rank")
    layer.finalize_state()


def _adapt_array(layer: Any, data: Any, steps: int | None, comm: _engine.Communicator) -> int:
    """Summarizes the joined array; returns its number of elements."""
    with on_every_rank(comm, layer):
        keys = _sorted_keys(np.zeros(0) if data is None else as_numpy(data))

    def added(counts: np.ndarray) -> np.ndarray:
        options = _engine.OpOptions(_engine.ReduceOp.SUM)
        names = ["ranks of values"]
        [total] = _engine.collectives.allreduce(comm, [counts], names, options, bucket_nbytes(comm))
        return np.array(total)

    total = int(added(np.array([len(keys)]))[0])
    if total == 0:
        return 0
    places, weight = places_of(total, layer.epsilon)
    values = _select(keys, np.array(places), added)
    layer.summary = np.stack([values, np.ones_like(values) * weight])
    layer.update_state(np.zeros(0))  # compresses
    return total


def _adapt_batches(layer: Any, data: Any, steps: int | None, comm: _engine.Communicator) -> int:
    """Summarizes the joined batches one after the other; returns their number of elements."""
    batches, total = _batches_of(data, steps), 0
    while True:
        with on_every_rank(comm, layer):
            mine = next(batches, None)
        everyone = _engine.collectives.allgather_object(comm, mine, operation="a batch of data")
        found = [batch for batch in everyone if batch is not None]
        if not found:
            return total
        joined = np.concatenate(found)
        total += joined.size
        layer.update_state(joined)


def _batches_of(data: Any, steps: int | None) -> Iterator[np.ndarray]:
    for number, batch in enumerate(() if data is None else data):
        if number == steps:
            return
        yield as_numpy(batch).astype(np.float32).reshape(-1)


def _sorted_keys(values: np.ndarray) -> np.ndarray:
    """Returns integers in the order of float32 numbers, sorted; not a number comes last."""
    numbers = values.astype(np.float32).reshape(-1) + np.float32(0)  # without -0
    numbers[np.isnan(numbers)] = np.nan
    bits = numbers.view(np.uint32)
    return np.sort(np.where(bits & SIGN, ~bits, bits | SIGN))


def _select(
    keys: np.ndarray, places: np.ndarray, added: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray:
    """Returns the float32 numbers at places of the sorted keys of all ranks, bit by bit."""
    found = np.zeros(places.shape, np.uint32)
    for bit in range(31, -1, -1):
        tried = found | np.uint32(1 << bit)
        smaller = added(np.searchsorted(keys, tried).astype(np.int64))
        found = np.where(smaller <= places, tried, found)
    return np.where(found & SIGN, found ^ SIGN, ~found).astype(np.uint32).view(np.float32)
