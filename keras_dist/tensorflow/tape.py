"""`DistributedGradientTape`, and `DistributedOptimizer` with the arguments of Horovod's.

The gradients of a call are reduced by one plan of buckets, as by an optimizer. Each step has a new
tape, so the plans are kept in this module: as long as the first variable of the call exists.
"""

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_dist import errors, runtime
from keras_dist._compat.tensorflow import is_recorded
from keras_dist.ops.arguments import resolve_groups
from keras_dist.ops.descriptions import described_by
from keras_dist.ops.face import compressed, decompressed, wire_of
from keras_dist.ops.reduce_op import Average, ReduceOp
from keras_dist.ops.reduction_options import ReductionOptions, parse_layers, parse_reduction_options
from keras_dist.runtime.process_sets import ProcessSet, global_process_set
from keras_dist.tensorflow.host_callback import operation
from keras_dist.tensorflow.outer_tapes import guarded, reduced_with_gradient
from keras_dist.training import optimizer as optimizer_module
from keras_dist.training.gradient_reduction import GradientReduction, mark_reduced
from keras_dist.training.model_state import variable_name

# By the identity of the first variable among the sources (0: there is none), then by options.
_reductions: dict[int, dict[Any, GradientReduction]] = {}


def DistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = None,
    sparse_as_dense: bool = False,
    op: ReduceOp | str = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Returns a gradient tape that averages its gradients over the ranks.

    Use either the tape or `DistributedOptimizer`: the optimizer refuses gradients that a tape has
    reduced.

    Collective: not this call, but `gradient`. Every rank must call it with the same sources in the
    same order, on a tape with the same arguments.

    Args:
        gradtape: the tape, before or after recording, persistent or not. It is not changed.
        device_dense: accepted for scripts of Horovod; has no effect.
        device_sparse: accepted for scripts of Horovod; has no effect.
        compression: a member of `Compression`, or a class with its methods, which work on the
            gradients that are tensors. Defaults to `KERAS_DIST_COMPRESSION`.
        sparse_as_dense: whether `IndexedSlices`, the gradients of embeddings, are reduced as dense
            tensors. Defaults to `False`.
        op: `Average`, `Sum` or `Adasum`, or its name. Defaults to `Average`.
        gradient_predivide_factor: divisor of the gradients before the sum over ranks; the average
            is the same. Defaults to 1.0.
        num_groups: deprecated, until 2.0: `groups` as a number.
        groups: gradients that are reduced together: a number of groups, or lists of sources.
        process_set: the ranks to average over; other ranks keep their own gradients. Defaults to
            all ranks.
        scale_local_gradients: whether the gradients of local sources are divided by the number of
            ranks, as averages are. Defaults to `True`.

    Returns:
        A tape of the same class with three further or changed methods:
        `gradient(target, sources, output_gradients=None, use_generic_names=False)` returns averaged
        gradients; `register_local_source(source)` excludes a source from the reduction;
        `get_local_and_global_gradients`, with the arguments of `gradient`, returns two lists of
        (source, gradient) pairs: of local sources, and of other sources.

    Raises:
        InvalidArgumentError: an argument is invalid. It is an `ArgumentError` or an
            `ArgumentTypeError`.

    Example:
    ```python
    import keras_dist.tensorflow as hvd

    plain = tf.optimizers.SGD(0.01)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((y - model(x, training=True)) ** 2)
    tape = hvd.DistributedGradientTape(tape)
    gradients = tape.gradient(loss, model.trainable_variables)
    plain.apply_gradients(zip(gradients, model.trainable_variables))
    ```
    """
    return PartialDistributedGradientTape(
        gradtape,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        num_groups,
        groups,
        process_set,
        None,
        scale_local_gradients,
    )


@operation
@described_by(DistributedGradientTape)
def PartialDistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = None,
    sparse_as_dense: bool = False,
    op: ReduceOp | str = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    local_layers: keras.Layer | Iterable[keras.Layer] | None = None,
    scale_local_gradients: bool = True,
) -> Any:
    """The gradients of local layers are not reduced.

    Args:
        local_layers: a layer or a list of layers whose trainable variables are local sources.
            Defaults to none.
    """
    layers = parse_layers(local_layers)
    if not isinstance(gradtape, tf.GradientTape) or isinstance(gradtape, _DistributedTape):
        raise errors.ArgumentTypeError(
            runtime.where(),
            "a tf.GradientTape that is not distributed",
            f"{gradtape!r} of type {type(gradtape).__name__}",
            "Wrap the tape of the step once.",
        )
    options = parse_reduction_options(
        op,
        process_set,
        wire_of(compression),
        gradient_predivide_factor=gradient_predivide_factor,
        sparse_as_dense=sparse_as_dense,
        groups=resolve_groups(groups, num_groups),
        scale_local_gradients=scale_local_gradients,
    )
    base = type(gradtape)
    tape: Any = object.__new__(type(base.__name__, (_DistributedTape, base), {}))
    # The tapes share the recorded operations; the script may continue to record on either.
    tape.__dict__.update(gradtape.__dict__)
    tape._keras_dist_options, tape._keras_dist_compression = options, compression
    tape._keras_dist_registered, tape._keras_dist_layers = [], layers
    return tape


class _DistributedTape:
    """A mixin in front of the class of a tape."""

    _keras_dist_options: ReductionOptions
    _keras_dist_compression: Any
    _keras_dist_registered: list[Any]
    _keras_dist_layers: Sequence[keras.Layer]

    def register_local_source(self, source: Any) -> None:
        """Excludes a source from the reduction: each rank keeps its own gradient."""
        self._keras_dist_registered.append(source)

    @operation
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
    ) -> Any:
        """Returns the averaged gradients, in the structure of `sources`.

        Collective: every rank, with the same sources in the same order; blocks.
        """
        own = super().gradient(target, sources, output_gradients, unconnected_gradients)  # type: ignore[misc]
        flat = tf.nest.flatten(sources)
        self._check_local(flat)
        # `expand_composites=False`: `IndexedSlices` are one gradient, not three tensors.
        gradients = self._reduced(tf.nest.flatten(own, expand_composites=False), flat)
        return tf.nest.pack_sequence_as(sources, gradients)

    def get_local_and_global_gradients(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """Returns two lists of (source, gradient) pairs: of local sources, and of other sources.

        Collective: as `gradient`.
        """
        gradients = self.gradient(target, sources, output_gradients, use_generic_names)
        flat = tf.nest.flatten(sources)
        pairs = list(zip(flat, tf.nest.flatten(gradients), strict=True))
        local = {id(source) for source in self._reduction(flat).local_variables()}
        return (
            [pair for pair in pairs if id(pair[0]) in local],
            [pair for pair in pairs if id(pair[0]) not in local],
        )

    def _reduced(self, gradients: Sequence[Any], sources: Sequence[Any]) -> list[Any]:
        unknown = [source for source in sources if not source.shape.is_fully_defined()]
        if unknown:
            raise errors.ArgumentError(
                runtime.where(),
                "sources whose shapes are known when the step is traced",
                f"a source of shape {unknown[0].shape}",
                "Pass variables; reduce the gradients of other sources by hvd.grouped_allreduce.",
            )
        return self._reduction(sources).with_missing(gradients, sources, self._reduce)

    def _reduce(self, gradients: Sequence[Any], sources: Sequence[Any]) -> list[Any]:
        reduction = self._reduction(sources)
        local = {id(source) for source in reduction.local_variables()}
        if is_recorded():  # reduced rows have no gradient
            gradients = [g if g is None else tf.convert_to_tensor(g) for g in gradients]
        dense = [
            index
            for index, (gradient, source) in enumerate(zip(gradients, sources, strict=True))
            if isinstance(gradient, tf.Tensor) and id(source) not in local
        ]
        compression = self._keras_dist_compression
        inputs, contexts = compressed(compression, [gradients[index] for index in dense])
        reduced: list[Any] = []

        def reduce(*given: Any) -> list[Any]:
            reduced[:] = reduction(_replace_at(dense, given, gradients), sources)
            return [reduced[index] for index in dense]

        results = reduced_with_gradient(reduce, reduction, inputs)
        results = decompressed(compression, results, contexts)
        for index, (gradient, source) in enumerate(zip(reduced, sources, strict=True)):
            if isinstance(gradient, tf.IndexedSlices) and id(source) not in local:
                reduced[index] = guarded(reduction, gradient)
        return mark_reduced(_replace_at(dense, results, reduced))

    def _check_local(self, sources: Sequence[Any]) -> None:
        known = {id(source) for source in sources}
        wrong = [source for source in self._keras_dist_registered if id(source) not in known]
        if wrong:
            raise errors.ArgumentError(
                runtime.where(),
                "each local source to be among the sources of gradient",
                f"{variable_name(wrong[0])!r} of type {type(wrong[0]).__name__}, which is not",
                "Register the object that is passed as a source: a Keras variable and the "
                "tf.Variable that it holds are two.",
            )

    def _reduction(self, sources: Sequence[Any]) -> GradientReduction:
        """Returns the reduction with the options of this tape, which keeps its plans."""
        options, known = self._keras_dist_options, _reductions_of(sources)
        if options.key not in known:
            known[options.key] = GradientReduction(options)
        reduction = known[options.key]
        reduction.registered = list(self._keras_dist_registered)
        reduction.local_layers = self._keras_dist_layers
        return reduction


def _reductions_of(sources: Sequence[Any]) -> dict[Any, GradientReduction]:
    """Returns the reductions of some sources by options; they end with the first variable."""
    variables = (s for s in sources if isinstance(s, keras.Variable | tf.Variable))
    owner = next(variables, None)
    if owner is None:
        return _reductions.setdefault(0, {})
    if id(owner) not in _reductions:
        _reductions[id(owner)] = {}
        weakref.finalize(owner, _reductions.pop, id(owner), None).atexit = False
    return _reductions[id(owner)]


def _replace_at(indices: Sequence[int], new: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    result = list(values)
    for index, value in zip(indices, new, strict=True):
        result[index] = value
    return result


@described_by(optimizer_module.DistributedOptimizer)
def DistributedOptimizer(
    optimizer: keras.optimizers.Optimizer,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = None,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: ReduceOp | str = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> keras.optimizers.Optimizer:
    """Optimizers of TensorFlow 1 are not supported.

    Use either this function or `DistributedGradientTape`: an optimizer refuses gradients that a
    tape has reduced.

    Args:
        name: accepted for scripts of Horovod; has no effect.
        compression: a member of `Compression`, or a value that `keras_dist.DistributedOptimizer`
            takes. Defaults to `KERAS_DIST_COMPRESSION`.
    """
    return optimizer_module.DistributedOptimizer(
        optimizer,
        op,
        process_set,
        compression,
        name=name,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
        gradient_predivide_factor=gradient_predivide_factor,
        sparse_as_dense=sparse_as_dense,
        groups=groups,
        scale_local_gradients=scale_local_gradients,
        num_groups=num_groups,
    )
