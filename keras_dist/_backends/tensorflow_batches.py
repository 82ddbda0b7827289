"""Access to the batches of a train function on TensorFlow."""

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from keras_dist import errors


def skip_batches(count: int, logs: dict[str, Any], iterator: Any) -> dict[str, Any]:
    """Takes batches from the iterator. See `Backend.skip_batches`."""
    next(iterator)  # StopIteration ends the epoch, but an execution may be incomplete
    for _ in itertools.islice(iterator, count - 1):
        pass
    return logs


def first_batch(count: int, iterator: Any) -> tuple[Any, tuple[Any, ...]]:
    """Takes the batches of one call and returns an iterator over them. See `Backend.first_batch`.

    The new iterator has the same type, so that the train function is not traced again. That
    requires dense tensors.
    """
    specs = tf.nest.flatten(getattr(iterator, "element_spec", None))
    if not isinstance(iterator, tf.data.Iterator) or not all(
        isinstance(spec, tf.TensorSpec) for spec in specs
    ):
        return None, (iterator,)
    batches = list(_take(iterator, count))
    if not batches:
        return None, (iterator,)

    def with_spec(*batch: Any) -> Any:
        tensors = [
            tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=spec.shape)
            for tensor, spec in zip(tf.nest.flatten(batch), specs, strict=True)
        ]
        return tf.nest.pack_sequence_as(iterator.element_spec, tensors)

    datasets = [tf.data.Dataset.from_tensors(batch).map(with_spec) for batch in batches]
    dataset = functools.reduce(lambda first, second: first.concatenate(second), datasets)
    return batches[0], (iter(dataset),)


def _take(iterator: Any, count: int) -> Iterator[Any]:
    for _ in range(count):
        optional = iterator.get_next_as_optional()
        if not optional.has_value():
            return
        yield optional.get_value()


def build_from(model: Any, batches: Any) -> None:
    """Traces a train step, which creates the variables, without running it.

    See `Backend.build_from`.
    """
    try:
        tf.function(model.train_step).get_concrete_function(batches.element_spec)
    except Exception as error:
        raise errors.ArgumentError(
            "[keras_dist]",
            f"to build model {model.name!r} from the shapes of its data",
            f"{type(error).__name__}: {error}",
            "Build the model before fit: model.build(input_shape), or call it on a batch.",
        ) from error
