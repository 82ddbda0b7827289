"""Does a tf.data pipeline give its elements in the same order on every rank?

Each rank reads the whole pipeline and keeps every n-th element, so an order of its own would
make it train on samples of its neighbours and leave others out, silently. Looks at
transformations alone, never at data: randomness inside Python functions stays unseen.

tf.data tells nobody how a pipeline was made, so this reads private attributes, see `_compat`.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from keras_dist._compat import contract
from keras_dist._compat import tf_data as private

__all__ = ["Shuffled", "forgotten", "is_seeded", "seeds", "shuffled_last", "unordered"]

# Of functions and serialised pipelines; the classes of pipelines have names of their own.
RANDOM_OPS = ("ShuffleDataset", "ShuffleAndRepeatDataset", "RandomDataset")
UNSEEDED = (0, 0)
# Their state is in the kernel; with a seed each iteration begins with the same numbers.
STATEFUL_OPS = ("RandomStandardNormal", "RandomUniform", "RandomShuffle", "TruncatedNormal")
NO_SEED = 87654321  # what TensorFlow takes in place of a global seed


def unordered(dataset: tf.data.Dataset) -> str | None:
    """Returns what makes the order differ from run to run, in words, or `None`."""
    if UNSEEDED in seeds(dataset):
        return "one that was shuffled without a seed"
    for stage in _stages(dataset):
        racing = private.is_nondeterministic(stage) or (
            private.is_interleave(stage) and _interleaves_by_speed(stage)
        )
        if racing or any(_races(op.node_def) for op in _function_ops(stage)):
            return "one with deterministic=False in map() or interleave()"
    return None


def forgotten(dataset: tf.data.Dataset) -> str | None:
    """Returns what makes the order of an epoch differ in a later run, in words, or `None`."""
    if (what := unordered(dataset)) is not None:
        return what
    for stage in _stages(dataset):
        operations = list(_function_ops(stage))
        if private.reshuffles(stage) or any(op.type.startswith(RANDOM_OPS) for op in operations):
            return "one that is shuffled anew for each epoch"
        if any(_draws(op) for op in operations):
            return "one with random numbers without a seed"
    return None


def is_seeded() -> bool:
    """Tells whether TensorFlow has a global seed, as of `keras.utils.set_random_seed`."""
    return tf.compat.v1.get_seed(1)[0] != NO_SEED


def seeds(dataset: tf.data.Dataset) -> list[tuple[int | None, int | None]]:
    """Returns the two seeds of every shuffle upstream; they are 0 where none was given."""
    found = []
    for stage in _stages(dataset):
        if (own := private.seeds_of(stage)) is not None:
            found.append((_value(own[0]), _value(own[1])))
        for op in _function_ops(stage):
            if op.type.startswith(RANDOM_OPS):
                names = [argument.name for argument in op.op_def.input_arg]
                inputs = dict(zip(names, op.inputs, strict=False))
                found.append((_value(inputs["seed"]), _value(inputs["seed2"])))
    return found


@dataclasses.dataclass(frozen=True)
class Shuffled:
    """A pipeline that ends in `shuffle`, or in `shuffle` and `batch`, taken apart.

    Args:
        source: what is shuffled.
        buffer: samples among which the next is drawn.
        batch_size: samples in a batch; `None` where there is no `batch`.
        drops: whether a last batch that is not full is left out.
    """

    source: tf.data.Dataset
    buffer: int
    batch_size: int | None
    drops: bool


def shuffled_last(dataset: tf.data.Dataset) -> Shuffled | None:
    """Returns what a pipeline is that shuffles anew for each epoch and then at most batches."""
    contract.check("tf_data")
    batch_size, drops = None, False
    stage = _before_prefetch(dataset)
    if (batch := private.batch_of(stage)) is not None:
        batch_size, drops = _value(batch[0]), bool(_value(batch[1]))
        stage = _before_prefetch(private.input_of(stage))
    buffer = _value(private.shuffle_buffer_of(stage))
    if buffer is None or not private.reshuffles(stage):
        return None
    return Shuffled(private.input_of(stage), buffer, batch_size, drops)


def _before_prefetch(stage: Any) -> Any:
    return _before_prefetch(private.input_of(stage)) if private.is_prefetch(stage) else stage


def _stages(dataset: tf.data.Dataset) -> Iterator[Any]:
    """Yields a pipeline's transformations, from the last to the sources."""
    contract.check("tf_data")
    yield from private.stages_of(dataset)


def _function_ops(stage: Any) -> Iterator[Any]:
    """Yields the operations inside the functions given to a transformation."""
    for function in private.functions_of(stage):
        yield from function.graph.get_operations()


def _draws(op: Any) -> bool:
    attributes = op.node_def.attr
    return op.type.startswith(STATEFUL_OPS) and not attributes["seed"].i | attributes["seed2"].i


def _races(node: Any) -> bool:
    return "Dataset" in node.op and node.attr["deterministic"].s == b"false"


def _interleaves_by_speed(stage: Any) -> bool:
    graph = tf.compat.v1.GraphDef.FromString(private.serialized(stage))
    return any(map(_races, graph.node))


def _value(seed: Any) -> int | None:
    operation = getattr(seed, "op", None)
    if operation is not None and operation.type == "SelectV2":
        seed = operation.inputs[2]  # in a function tf.data guards the number against (0, 0)
    value = tf.get_static_value(seed) if seed is not None else None
    return None if value is None else int(value)
