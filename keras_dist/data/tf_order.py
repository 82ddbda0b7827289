"""Detection of tf.data pipelines whose order of elements may differ between ranks or runs.

Each rank reads the whole pipeline and keeps every n-th element. If the orders differed, some
samples would be used twice and others never, without an error. Only transformations are examined,
never data: randomness inside Python functions is not detected.

tf.data has no public description of a pipeline; `_compat.tf_data` reads its private attributes.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from keras_dist._compat import contract
from keras_dist._compat import tf_data as private

# Names in functions and serialised pipelines; the classes of pipelines have other names.
RANDOM_OPS = ("ShuffleDataset", "ShuffleAndRepeatDataset", "RandomDataset")
UNSEEDED = (0, 0)
# The state is in the kernel; with a seed each iteration draws the same numbers.
STATEFUL_OPS = ("RandomStandardNormal", "RandomUniform", "RandomShuffle", "TruncatedNormal")
NO_SEED = 87654321  # TensorFlow's default for the global seed


def unordered(dataset: tf.data.Dataset) -> str | None:
    """Returns the reason why the order may differ between runs, in words, or `None`."""
    if UNSEEDED in seeds(dataset):
        return "one that was shuffled without a seed"
    for stage in stages(dataset):
        racing = private.is_nondeterministic(stage) or (
            private.is_interleave(stage) and _interleaves_by_speed(stage)
        )
        if racing or any(_is_nondeterministic(op.node_def) for op in function_ops(stage)):
            return "one with deterministic=False in map() or interleave()"
    return None


def not_restored(dataset: tf.data.Dataset) -> str | None:
    """Returns the reason why a resumed run has another order, in words, or `None`."""
    if (what := unordered(dataset)) is not None:
        return what
    for stage in stages(dataset):
        operations = list(function_ops(stage))
        if private.reshuffles(stage) or any(op.type.startswith(RANDOM_OPS) for op in operations):
            return "one that is reshuffled in each epoch"
        if any(_draws(op) for op in operations):
            return "one with random numbers without a seed"
    return None


def is_seeded() -> bool:
    """Returns whether the global seed of TensorFlow is set, as by `keras.utils.set_random_seed`."""
    return global_seed() != NO_SEED


def global_seed() -> int:
    """Returns the global seed of TensorFlow, or `NO_SEED`."""
    return tf.compat.v1.get_seed(1)[0]


def seeds(dataset: tf.data.Dataset) -> list[tuple[int | None, int | None]]:
    """Returns the two seeds of every shuffle of the pipeline; 0 if not set."""
    found = []
    for stage in stages(dataset):
        if (own := private.seeds_of(stage)) is not None:
            found.append((_value(own[0]), _value(own[1])))
        for op in function_ops(stage):
            if op.type.startswith(RANDOM_OPS):
                names = [argument.name for argument in op.op_def.input_arg]
                inputs = dict(zip(names, op.inputs, strict=False))
                found.append((_value(inputs["seed"]), _value(inputs["seed2"])))
    return found


@dataclasses.dataclass(frozen=True)
class Shuffled:
    """The parts of a pipeline that ends in `shuffle`, or in `shuffle` and `batch`."""

    source: tf.data.Dataset
    buffer: int
    batch_size: int | None
    drops: bool


def shuffled_last(dataset: tf.data.Dataset) -> Shuffled | None:
    """Returns the parts of a pipeline that ends in a reshuffling `shuffle`, and maybe a `batch`."""
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


def stages(dataset: tf.data.Dataset) -> Iterator[Any]:
    """Yields the transformations of a pipeline, from the last to the sources."""
    contract.check("tf_data")
    yield from private.stages_of(dataset)


def function_ops(stage: Any) -> Iterator[Any]:
    """Yields the operations of the functions of a transformation."""
    for function in private.functions_of(stage):
        yield from function.graph.get_operations()


def _draws(op: Any) -> bool:
    attributes = op.node_def.attr
    return op.type.startswith(STATEFUL_OPS) and not attributes["seed"].i | attributes["seed2"].i


def _is_nondeterministic(node: Any) -> bool:
    return "Dataset" in node.op and node.attr["deterministic"].s == b"false"


def _interleaves_by_speed(stage: Any) -> bool:
    graph = tf.compat.v1.GraphDef.FromString(private.serialized(stage))
    return any(map(_is_nondeterministic, graph.node))


def _value(seed: Any) -> int | None:
    operation = getattr(seed, "op", None)
    if operation is not None and operation.type == "SelectV2":
        seed = operation.inputs[2]  # tf.data replaces (0, 0) with a conditional
    value = tf.get_static_value(seed) if seed is not None else None
    return None if value is None else int(value)
