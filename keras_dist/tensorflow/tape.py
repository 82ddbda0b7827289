"""DistributedGradientTape: a tape of TensorFlow's whose gradients are those of all ranks.

All gradients of a call are one plan of buckets, as an optimizer's are. Tapes come and go with each
step, so what reduces for them is kept here: one for each set of options.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_dist import errors, runtime
from keras_dist.ops.arguments import resolve_groups
from keras_dist.ops.descriptions import described_by
from keras_dist.ops.reduce_op import Average, ReduceOp
from keras_dist.ops.reduction_options import ReductionOptions, parse_layers, parse_reduction_options
from keras_dist.ops.tensor_compression import compressed, decompressed, wire_of
from keras_dist.runtime.process_sets import ProcessSet, global_process_set
from keras_dist.tensorflow.host_callback import operation
from keras_dist.training.gradient_reduction import GradientReduction, mark_reduced

__all__ = ["DistributedGradientTape", "PartialDistributedGradientTape"]

_reductions: dict[Any, GradientReduction] = {}


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
    """Makes a tape that averages its gradients over the ranks.

    Use it or `DistributedOptimizer`, not both: such an optimizer refuses gradients that a tape
    has reduced.

    Collective: not this call, but `gradient`: every rank must call it with the same sources, in
    the same order, and the same arguments here.

    Args:
        gradtape: the tape, recorded or about to record; persistent or not. It stays as it is.
        device_dense: accepted; has no effect, gradients travel through the host.
        device_sparse: as `device_dense`.
        compression: of `Compression`, or a class with its methods, which work on the gradients
            that are tensors. The arguments below are those of `keras_dist.DistributedOptimizer`.
        sparse_as_dense: whether an embedding's gradient is reduced as a whole in place of its
            rows. Defaults to `False`.
        op: `Average`, `Sum` or `Adasum`, or its name. Defaults to `Average`.
        gradient_predivide_factor: an average divides by it before the sum over the ranks.
            Defaults to 1.0.
        num_groups: deprecated: `groups` as a number.
        groups: which gradients travel together: a number of groups, or lists of sources.
        process_set: the ranks that average among themselves; the others keep their own. Defaults
            to all.
        scale_local_gradients: whether gradients of local sources are divided by the number of
            ranks, as averaged ones are. Defaults to `True`.

    Returns:
        A tape of the same class, with three methods that differ:
        `gradient(target, sources, output_gradients=None, use_generic_names=False)` gives
        gradients of all ranks; `register_local_source(source)` leaves a source to each rank;
        `get_local_and_global_gradients`, with the arguments of `gradient`, gives two lists of
        pairs of source and gradient: those of local sources, and those of the others.

    Raises:
        InvalidArgumentError: an argument cannot be used. It is an `ArgumentError`, or an
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
    """Some layers are local: their gradients stay on each rank.

    Args:
        local_layers: a layer or a list of layers whose trainable variables are local sources.
            Defaults to none.
    """
    layers = parse_layers(local_layers)
    if not isinstance(gradtape, tf.GradientTape) or isinstance(gradtape, _DistributedTape):
        raise errors.ArgumentTypeError(
            errors.explain(
                runtime.where(),
                "a tf.GradientTape that is not distributed yet",
                f"{gradtape!r} of type {type(gradtape).__name__}",
                "Wrap the tape of the step once.",
            )
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
    made: Any = object.__new__(type(base.__name__, (_DistributedTape, base), {}))
    # What has been recorded is shared; which of the two records from now on is the user's choice.
    made.__dict__.update(gradtape.__dict__)
    made._keras_dist_options, made._keras_dist_compression = options, compression
    made._keras_dist_registered, made._keras_dist_layers = [], layers
    return made


class _DistributedTape:
    """What makes a tape distributed. Comes before the tape's own class."""

    _keras_dist_options: ReductionOptions
    _keras_dist_compression: Any
    _keras_dist_registered: list[Any]
    _keras_dist_layers: Sequence[keras.Layer]

    def register_local_source(self, source: Any) -> None:
        """Leaves a source out of the reduction: each rank keeps its own gradient.

        Args:
            source: a variable, or a tensor that is watched.
        """
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
        """Returns the gradients of all ranks, in the structure of `sources`.

        Collective: every rank, with the same sources in the same order; blocks.

        Args:
            target: what is differentiated.
            sources: variables or watched tensors, in any structure.
            output_gradients: as for `tf.GradientTape.gradient`.
            use_generic_names: accepted; has no effect, gradients meet by their order.
            unconnected_gradients: as for `tf.GradientTape.gradient`.
        """
        own = super().gradient(target, sources, output_gradients, unconnected_gradients)  # type: ignore[misc]
        flat = tf.nest.flatten(sources)
        # `IndexedSlices` are one gradient, not three tensors.
        gradients = self._reduced(tf.nest.flatten(own, expand_composites=False), flat)
        return tf.nest.pack_sequence_as(sources, gradients)

    def get_local_and_global_gradients(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """Returns pairs of source and gradient: those of local sources, then those of all ranks.

        Collective: as `gradient`.

        Args:
            target: as for `gradient`.
            sources: as for `gradient`.
            output_gradients: as for `gradient`.
            use_generic_names: as for `gradient`.
        """
        gradients = self.gradient(target, sources, output_gradients, use_generic_names)
        flat = tf.nest.flatten(sources)
        pairs = list(zip(flat, tf.nest.flatten(gradients), strict=True))
        local = {id(source) for source in self._reduction().local_variables()}
        return (
            [pair for pair in pairs if id(pair[0]) in local],
            [pair for pair in pairs if id(pair[0]) not in local],
        )

    def _reduced(self, gradients: Sequence[Any], sources: Sequence[Any]) -> list[Any]:
        unknown = [source for source in sources if not source.shape.is_fully_defined()]
        if unknown:
            raise errors.ArgumentError(
                errors.explain(
                    runtime.where(),
                    "sources whose shapes are known when the step is traced",
                    f"one of shape {unknown[0].shape}",
                    "Pass variables; reduce the gradients of others by hvd.grouped_allreduce.",
                )
            )
        reduction = self._reduction()
        local = {id(source) for source in reduction.local_variables()}
        places = [
            place
            for place, (gradient, source) in enumerate(zip(gradients, sources, strict=True))
            if isinstance(gradient, tf.Tensor) and id(source) not in local
        ]
        how = self._keras_dist_compression
        small, contexts = compressed(how, [gradients[place] for place in places])
        reduced = reduction(_with(gradients, places, small), sources)
        whole = decompressed(how, [reduced[place] for place in places], contexts)
        return mark_reduced(_with(reduced, places, whole))

    def _reduction(self) -> GradientReduction:
        """Returns what reduces on the options of this tape, and has made plans for its sources."""
        options = self._keras_dist_options
        if options.key not in _reductions:
            _reductions[options.key] = GradientReduction(options)
        reduction = _reductions[options.key]
        reduction.registered = list(self._keras_dist_registered)
        reduction.local_layers = self._keras_dist_layers
        return reduction


def _with(values: Sequence[Any], places: Sequence[int], others: Sequence[Any]) -> list[Any]:
    """Returns a list of values with others at some places."""
    result = list(values)
    for place, other in zip(places, others, strict=True):
        result[place] = other
    return result
