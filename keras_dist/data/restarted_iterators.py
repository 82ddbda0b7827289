"""What of the data of a fit a resumed run begins anew, and cannot find again.

Looks at the arguments of `fit`, never at samples. What Python, numpy and torch draw in this
process is found again by the states of their generators, see `generators`; what is named here is
kept inside TensorFlow, or in objects of the user's own.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from keras_dist.data import epochs
from keras_dist.data.kinds import is_a, is_tf_dataset

__all__ = ["begun_anew"]


def begun_anew(arguments: Mapping[str, Any], backend: str) -> list[str]:
    """Returns, in words, what begins anew when a fit is resumed; mostly nothing.

    Args:
        arguments: those of `fit`, by name; none where nothing is known of it.
        backend: the name of the backend.
    """
    data = arguments.get("x")
    if data is None:
        return []
    steps = arguments.get("steps_per_epoch")
    return [*_orders(data, arguments, backend), *_parts(data, arguments, backend, steps)]


def _orders(data: Any, arguments: Mapping[str, Any], backend: str) -> Iterator[str]:
    if is_a(data, "keras", "PyDataset") and arguments.get("shuffle") and _has_workers(data):
        yield "the order in which Keras shuffles a PyDataset with workers"
    if (counted := epochs.of(data)) is not None:
        if counted.forgets is not None:
            yield f"the order of {counted.forgets}"
    elif epochs.is_shared_out(data):
        return
    elif is_tf_dataset(data):
        from keras_dist.data.tf_order import forgotten

        if (what := forgotten(data)) is not None:
            yield f"the order of a tf.data.Dataset, {what}"
    elif hasattr(data, "__next__"):
        yield "a generator, which is read from its begin"
    elif is_a(data, "keras", "PyDataset"):
        if _has_hooks(data):
            yield "what a PyDataset does in its own on_epoch_begin or on_epoch_end"
    elif backend == "tensorflow" and arguments.get("shuffle") and _rows(data) is not None:
        from keras_dist.data.tf_order import is_seeded

        if not is_seeded():
            yield "the order in which TensorFlow shuffles arrays without a seed"


def _parts(
    data: Any, arguments: Mapping[str, Any], backend: str, steps: int | None
) -> Iterator[str]:
    if steps is None or hasattr(data, "__next__"):
        return
    whole = _count(data, arguments, steps) == steps
    # torch draws the seed of a loader when the epoch before ends.
    if not whole or (backend == "torch" and arguments.get("shuffle") and not is_tf_dataset(data)):
        yield f"the place in data of which steps_per_epoch={steps} takes a part at a time"


def _count(data: Any, arguments: Mapping[str, Any], steps: int) -> int | None:
    """Returns the number of batches in data, where it is known."""
    if is_a(data, "keras", "PyDataset"):
        return data.num_batches
    if epochs.is_shared_out(data) or is_tf_dataset(data) or _is_loader(data):
        try:
            return len(data)
        except TypeError:  # it has no end, or none that is known
            return None
    rows, size = _rows(data), arguments.get("batch_size")
    return -(-rows // size) if rows is not None and size else steps


def _rows(data: Any) -> int | None:
    """Returns the number of samples in arrays; `None` of anything else."""
    while isinstance(data, dict | list | tuple) and data:
        data = next(iter(data.values() if isinstance(data, dict) else data))
    shape = getattr(data, "shape", None)
    return int(shape[0]) if shape else None


def _is_loader(data: Any) -> bool:
    return is_a(data, "torch", "DataLoader")


def _has_workers(data: Any) -> bool:
    """Tells whether others than the thread that trains ask a `PyDataset` for batches.

    Keras begins that before a fit, and its first epoch has batches of this begin. Of what
    `keras_dist.data` shares out the order is Keras' in worker processes alone.
    """
    several = data.workers > 1 and not epochs.is_shared_out(data)
    return bool(several or data.use_multiprocessing)


def _has_hooks(data: Any) -> bool:
    """Tells whether a `PyDataset` changes at the begin or end of an epoch."""
    return any(
        not getattr(type(data), name).__module__.startswith("keras.")
        for name in ("on_epoch_begin", "on_epoch_end")
        if hasattr(type(data), name)
    )
