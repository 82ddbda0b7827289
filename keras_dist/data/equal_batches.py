"""Whether the batches of all ranks have equal shapes in each step, known before the first one."""

from collections.abc import Hashable, Mapping
from typing import Any

from keras_dist.data import epochs
from keras_dist.data.kinds import is_tf_dataset

UNKNOWN = -2  # the cardinality of a `tf.data.Dataset`


def shapes_of_batches(arguments: Mapping[str, Any]) -> Hashable | None:
    """Returns what determines the shapes of all batches of a fit on this rank.

    If it is equal on all ranks, the ranks have batches of equal shapes in each step.

    Returns:
        A hashable description; `None` if the shapes are not known before the batches are made.
    """
    data, count = arguments["x"], None
    sharded = epochs.of(data)
    if sharded is not None and sharded.shapes is not None:
        return sharded.shapes
    leaves = _leaves((data, arguments["y"]))
    if is_tf_dataset(data):
        leaves, count = _leaves(data.element_spec), int(data.cardinality())
    shapes = [_shape(leaf) for leaf in leaves]
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


def _leaves(nested: Any) -> list[Any]:
    """Returns the values in tuples, lists and dicts, without those that are `None`."""
    if isinstance(nested, dict):
        nested = [nested[key] for key in sorted(nested)]
    if isinstance(nested, tuple | list):
        return [leaf for inner in nested for leaf in _leaves(inner)]
    return [] if nested is None else [nested]
