"""What the data passed to `fit` tells before the first step; samples are never examined.

Whether the batches of all ranks have equal shapes, and which orders and positions a resumed run
cannot restore: states inside TensorFlow or in objects of the user, see `resume.state` for others.
"""

from collections.abc import Hashable, Iterator, Mapping
from typing import Any

from keras_dist.data import epochs
from keras_dist.data.nested import is_a, is_tf_dataset, leaves

UNKNOWN = -2  # the cardinality of a `tf.data.Dataset`


def shapes_of_batches(arguments: Mapping[str, Any]) -> Hashable | None:
    """Returns what determines the shapes of all batches of this rank; `None` if not known yet."""
    data, count = arguments["x"], None
    sharded = epochs.of(data)
    if sharded is not None and sharded.shapes is not None:
        return sharded.shapes
    nested: Any = data, arguments["y"]
    if is_tf_dataset(data):
        nested, count = data.element_spec, int(data.cardinality())
    shapes = [_shape(leaf) for _, leaf in leaves(nested) if leaf is not None]
    if None in shapes or count == UNKNOWN:
        return None
    names = ("batch_size", "validation_split", "steps_per_epoch")
    return tuple(shapes), count, tuple(arguments[name] for name in names)


def _shape(leaf: Any) -> tuple[int, ...] | None:
    """Returns the shape of an array or of the specification of one; `None` if it may change."""
    try:
        shape = tuple(leaf.shape)
    except (AttributeError, ValueError):  # no array, or the rank is unknown
        return None
    return None if None in shape else shape


# --- Orders and positions that are not restored


def restarted(arguments: Mapping[str, Any], backend: str) -> list[str]:
    """Returns descriptions of the states that restart when a fit is resumed; usually none."""
    data = arguments.get("x")
    if data is None:
        return []
    steps = arguments.get("steps_per_epoch")
    return [*_orders(data, arguments, backend), *_positions(data, arguments, backend, steps)]


def _orders(data: Any, arguments: Mapping[str, Any], backend: str) -> Iterator[str]:
    if (counted := epochs.of(data)) is not None:
        if counted.not_restored is not None:
            yield f"the order of {counted.not_restored}"
    elif epochs.is_sharded(data):
        return
    elif is_tf_dataset(data):
        from keras_dist.data.tf_order import not_restored

        if (what := not_restored(data)) is not None:
            yield f"the order of a tf.data.Dataset, {what}"
    elif hasattr(data, "__next__"):
        yield "a generator, which is read from the start"
    elif is_a(data, "keras", "PyDataset"):
        # Keras starts workers before a fit: the first epoch has the order of that time.
        if arguments.get("shuffle") and epochs.has_workers(data):
            yield "the order in which Keras shuffles a PyDataset with workers"
        if _has_hooks(data):
            yield "what a PyDataset does in its own on_epoch_begin or on_epoch_end"
    elif backend == "tensorflow" and arguments.get("shuffle") and _rows(data) is not None:
        from keras_dist.data.tf_order import is_seeded

        if not is_seeded():
            yield "the order in which TensorFlow shuffles arrays without a seed"


def _positions(
    data: Any, arguments: Mapping[str, Any], backend: str, steps: int | None
) -> Iterator[str]:
    if steps is None or hasattr(data, "__next__"):
        return
    whole = _count(data, arguments, steps) == steps
    # torch draws the seed of a loader when the previous epoch ends.
    if not whole or (backend == "torch" and arguments.get("shuffle") and not is_tf_dataset(data)):
        yield f"the position in data of which an epoch of steps_per_epoch={steps} reads a part"


def _count(data: Any, arguments: Mapping[str, Any], steps: int) -> int | None:
    """Returns the number of batches of a data set, if it is known."""
    if is_a(data, "keras", "PyDataset"):
        return data.num_batches
    if epochs.is_sharded(data) or is_tf_dataset(data) or is_a(data, "torch", "DataLoader"):
        try:
            return len(data)
        except TypeError:  # infinite or unknown
            return None
    rows, size = _rows(data), arguments.get("batch_size")
    return -(-rows // size) if rows is not None and size else steps


def _rows(data: Any) -> int | None:
    """Returns the number of samples of arrays; `None` for anything else."""
    while isinstance(data, dict | list | tuple) and data:
        data = next(iter(data.values() if isinstance(data, dict) else data))
    shape = getattr(data, "shape", None)
    return int(shape[0]) if shape else None


def _has_hooks(data: Any) -> bool:
    """Returns whether a `PyDataset` overrides a hook at the start or end of an epoch."""
    return any(
        not getattr(type(data), name).__module__.startswith("keras.")
        for name in ("on_epoch_begin", "on_epoch_end")
        if hasattr(type(data), name)
    )
