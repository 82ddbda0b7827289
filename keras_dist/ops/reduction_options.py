"""The options of gradient reductions, and the checks of their arguments."""

import dataclasses
import numbers
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_dist import _engine, errors, runtime
from keras_dist.runtime.process_sets import ProcessSet

#: a number of groups of equal length, or the variables of each group
Groups = int | tuple[tuple[Any, ...], ...]


@dataclasses.dataclass(frozen=True, eq=False)
class ReductionOptions:
    """Options of the gradient reduction of one optimizer."""

    op: _engine.ReduceOp = _engine.ReduceOp.AVERAGE
    process_set: ProcessSet | None = None
    sets: tuple[tuple[int, ...], ...] = ()
    compression: _engine.Compressor | _engine.GradientCompression = _engine.Compression.none
    predivide: float = 1.0
    sparse_as_dense: bool = False
    groups: Groups = ()
    passes: int = 1
    averages: bool = False
    scale_local: bool = True
    shard_state: bool = False
    #: a `LocalSteps`, and the ranks that reduce in each step nevertheless; `None` for none
    local_steps: Any = None
    within: ProcessSet | None = None

    @property
    def is_local(self) -> bool:
        """Whether each rank makes steps of its own."""
        return self.local_steps is not None and self.within is None

    @property
    def each_step(self) -> ProcessSet | None:
        """The ranks that reduce in each step, unless these are local; `None` for all ranks."""
        return self.process_set if self.within is None else self.within

    @property
    def key(self) -> tuple[Any, ...]:
        groups = self.groups
        if not isinstance(groups, int):
            groups = tuple(tuple(id(variable) for variable in group) for group in groups)
        fields = dict(vars(self), groups=groups, compression=self.compression.name)
        return tuple(fields.values())

    @property
    def wire(self) -> _engine.Compressor:
        given = self.compression
        return given if isinstance(given, _engine.Compressor) else _engine.Compression.none

    @property
    def gradient_compression(self) -> _engine.GradientCompression | None:
        """The compression with error feedback of gradients, if it is one."""
        given = self.compression
        if self.local_steps is None and isinstance(given, _engine.GradientCompression):
            return given
        return None

    @property
    def takes_rows(self) -> bool:
        """Whether each step reduces gradients that are rows, uncompressed and by themselves."""
        is_plain = self.compression is _engine.Compression.none and not self.groups
        each_step = self.passes == 1 and self.local_steps is None and not self.shard_state
        sums = (_engine.ReduceOp.SUM, _engine.ReduceOp.AVERAGE)
        return is_plain and each_step and self.op in sums and not self.sparse_as_dense

    @property
    def dense(self) -> bool:
        return self.sparse_as_dense or self.op is _engine.ReduceOp.ADASUM

    @property
    def factor(self) -> float:
        """Factor of every gradient before the reduction: Keras gives the mean of several passes."""
        return 1.0 if self.averages else float(self.passes)

    def of_rounds(self) -> "ReductionOptions":
        """Returns the options by which differences of weights are averaged after local steps."""
        return dataclasses.replace(self, local_steps=None, within=None, groups=(), passes=1)

    def ranks(self) -> _engine.Communicator:
        """Returns the current communicator of the ranks that reduce in each step."""
        return runtime.communicator(self.each_step)

    def scaling(self, size: int) -> tuple[_engine.ReduceOp, float, float]:
        """Returns the op to run, and the factors before and after it."""
        if self.predivide == 1:
            return self.op, 1.0, 1.0
        return _engine.ReduceOp.SUM, 1 / self.predivide, self.predivide / size

    def grouped(self, variables: Sequence[Any]) -> list[list[int]]:
        if isinstance(self.groups, int):
            equal = np.array_split(np.arange(len(variables)), self.groups)
            return [group.tolist() for group in equal if len(group)]
        index_of = {id(variable): index for index, variable in enumerate(variables)}
        groups = [[index_of[id(v)] for v in group if id(v) in index_of] for group in self.groups]
        return [sorted(group) for group in groups if group]


def parse_reduction_options(
    op: Any,
    process_set: Any,
    compression: Any,
    *,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    gradient_predivide_factor: float = 1.0,
    sparse_as_dense: bool = False,
    groups: Any = None,
    scale_local_gradients: bool = True,
    shard_state: bool = False,
) -> ReductionOptions:
    """Returns the options that arguments of `keras_dist.DistributedOptimizer` select."""
    where = runtime.where()
    parsed = _parse_op(op, average_aggregated_gradients, where)
    predivide = parse_predivide(gradient_predivide_factor, parsed, where)
    passes = parse_passes(backward_passes_per_step, where)
    grouped = parse_groups(groups, where)
    compressor = _engine.parse_gradient_compression(compression, where)
    if isinstance(compressor, _engine.GradientCompression):
        _check_feedback(compressor, parsed, shard_state, where)
    # `includes_me` raises an error for an unknown process set.
    if runtime.includes_me(process_set) and parsed is _engine.ReduceOp.ADASUM:
        _engine.collectives.check_power_of_two(runtime.communicator(process_set))
    return ReductionOptions(
        op=parsed,
        process_set=process_set,
        sets=runtime.ranks_of(process_set),
        compression=compressor,
        predivide=predivide,
        sparse_as_dense=bool(sparse_as_dense),
        groups=grouped,
        passes=passes,
        averages=bool(average_aggregated_gradients),
        scale_local=bool(scale_local_gradients),
        shard_state=bool(shard_state),
    )


def _check_feedback(
    compression: _engine.GradientCompression, op: _engine.ReduceOp, shards: bool, where: str
) -> None:
    """Checks that a compression with error feedback is defined for the other options."""
    if op is _engine.ReduceOp.ADASUM or shards:
        wrong = "op=Adasum" if op is _engine.ReduceOp.ADASUM else "shard_state=True"
        raise errors.ArgumentError(
            where,
            f"op to be Average or Sum, and no shard_state, with compression={compression.name}",
            wrong,
            "Omit one of the two, or use compression='bf16'.",
        )


def parse_passes(passes: Any, where: str) -> int:
    """Returns the number of backward passes per step."""
    expected, remedy = "backward_passes_per_step to be 1 or more", "1 makes a step of each pass."
    return _positive(passes, expected, remedy, where)


def parse_predivide(factor: Any, op: _engine.ReduceOp, where: str) -> float:
    """Returns `gradient_predivide_factor`, checked."""
    parsed = _engine.parse_factor(factor, "gradient_predivide_factor", where)
    if parsed <= 0:
        expected, remedy = "gradient_predivide_factor to be above 0", "1.0 changes nothing."
        raise errors.ArgumentError(where, expected, repr(factor), remedy)
    if parsed != 1 and op is not _engine.ReduceOp.AVERAGE:
        expected = "op to be Average with a gradient_predivide_factor"
        remedy = "Omit the factor: only the division of an average can be split."
        raise errors.ArgumentError(where, expected, op.value, remedy)
    return parsed


def parse_groups(groups: Any, where: str) -> Groups:
    """Returns the groups of gradients, `()` for `None`."""
    expected = "groups to be a number of groups, 1 or more, or lists of variables"
    remedy = "Pass for example groups=2, or [layer.trainable_variables for layer in layers]."
    if groups is None:
        return ()
    if not isinstance(groups, list | tuple):
        return _positive(groups, expected, remedy, where)
    lists = all(isinstance(group, list | tuple) for group in groups)
    variables = [variable for group in groups for variable in group] if lists else []
    wrong = [groups] if not lists else [v for v in variables if not is_variable(v)]
    if wrong:
        received = f"{wrong[0]!r} of type {type(wrong[0]).__name__}"
        raise errors.ArgumentTypeError(where, expected, received, remedy)
    if len({id(variable) for variable in variables}) < len(variables):
        expected = "each variable once in groups"
        received = f"a variable twice among {len(variables)}"
        remedy = "Remove the duplicates."
        raise errors.ArgumentError(where, expected, received, remedy)
    return tuple(tuple(group) for group in groups)


def parse_layers(layers: Any) -> tuple[Any, ...]:
    """Returns the layers of `local_layers`: a Keras layer or a collection of layers."""
    import keras  # only here: torch scripts do not import Keras

    if layers is None:
        return ()
    is_collection = isinstance(layers, list | tuple | set | frozenset)
    parsed = tuple(layers) if is_collection else (layers,)
    wrong = [layer for layer in parsed if not isinstance(layer, keras.Layer)]
    if wrong:
        raise errors.ArgumentTypeError(
            runtime.where(),
            "local_layers to be a Keras layer or a list of layers",
            f"{wrong[0]!r} of type {type(wrong[0]).__name__}",
            "Pass for example local_layers=[model.layers[0]].",
        )
    return parsed


def _parse_op(op: Any, averages: bool, where: str) -> _engine.ReduceOp:
    """Returns the op, after a check that it is defined for gradients."""
    parsed = _engine.parse_op(op, where)
    if parsed not in (_engine.ReduceOp.AVERAGE, _engine.ReduceOp.SUM, _engine.ReduceOp.ADASUM):
        raise errors.ArgumentError(
            where,
            "op to be Average, Sum or Adasum for gradients",
            parsed.value,
            "Use Average.",
        )
    if parsed is _engine.ReduceOp.ADASUM and averages:
        raise errors.ArgumentError(
            where,
            "op to be Average or Sum with average_aggregated_gradients",
            parsed.value,
            "Omit average_aggregated_gradients.",
        )
    return parsed


def _positive(number: Any, expected: str, remedy: str, where: str) -> int:
    if not isinstance(number, numbers.Integral) or isinstance(number, bool):
        received = f"{number!r} of type {type(number).__name__}"
        raise errors.ArgumentTypeError(where, expected, received, remedy)
    if number < 1:
        raise errors.ArgumentError(where, expected, repr(number), remedy)
    return int(number)


def is_variable(value: Any) -> bool:
    """Returns whether a value is a variable of Keras or TensorFlow, or a torch parameter."""
    return hasattr(value, "assign") or hasattr(value, "requires_grad")
