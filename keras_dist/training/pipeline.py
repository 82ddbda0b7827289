"""`Pipeline`: a model split into stages, one on each rank, trained by micro-batches.

Stages exchange activations and gradients. If there are replicas of the pipeline, the optimizer of
each stage averages the gradients over its replicas.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from keras_dist import _backends, errors, runtime
from keras_dist._compat.keras.models import has_mask, is_summed, outputs_of
from keras_dist.training.stage_channel import StageChannel
from keras_dist.training.update_check import check_independent


class Pipeline:
    """A model whose stages are on several ranks, for models too large for one device.

    A batch is split into micro-batches. Each passes through all stages, from rank to rank, while
    other stages work on other micro-batches; after the last micro-batch the gradients pass back
    in reverse (GPipe). Then each stage makes one step of its optimizer, by the gradient of the mean
    loss of the batch, as the whole model would on one device.

    Stages are not compiled, and stages idle at the begin and the end of each batch: use several
    times as many micro-batches as stages. `BatchNormalization` normalizes over micro-batches.
    Keras' masks do not pass from stage to stage.

    Args:
        model: the stage of this rank, a built Keras model with one output and one input, whose
            first dimension is the samples.
        optimizer: the Keras optimizer of this stage, or its name; without `global_clipnorm` or
            loss scale, which would act on this stage alone. If other ranks hold replicas of the
            pipeline, a `DistributedOptimizer` with the process set of the ranks of this stage.
        loss: a Keras loss, its name or a function. Its mean over the samples is minimized, or its
            sum if its `reduction` is `"sum"`. Used by the last stage only.
        micro_batches: number of micro-batches in a batch; the same on all stages. Defaults to 1.
        ranks: the ranks of the stages, first to last, including this rank. Defaults to all ranks.

    Raises:
        ArgumentError: `model` is not built, or its outputs have a mask; `optimizer` combines the
            gradients of several variables; the last stage has no `loss`; `micro_batches` is not
            an integer of at least 1; or `ranks` are not distinct ranks of the job with this rank.

    Example:
    ```python
    stages = [
        [keras.Input((8,)), keras.layers.Dense(64, "relu")],
        [keras.Input((64,)), keras.layers.Dense(1)],
    ]
    model = keras.Sequential(stages[keras_dist.rank()])
    pipeline = keras_dist.Pipeline(model, "adam", "mse", micro_batches=8)
    for start in range(0, 128, 32):
        batch = slice(start, start + 32)
        loss = pipeline.train_on_batch(x_train[batch], y_train[batch])
    ```

    Reference:
        Huang et al. 2019, GPipe: Efficient Training of Giant Neural Networks using Pipeline
        Parallelism, https://arxiv.org/abs/1811.06965
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        loss: Any,
        micro_batches: int = 1,
        ranks: Sequence[int] | None = None,
    ):
        every = _parse_ranks(range(runtime.size()) if ranks is None else ranks)
        if not model.built:
            remedy = "Begin the model with keras.Input(shape), or call its build method."
            raise _error("a built stage", f"model {model.name!r}, which is not built", remedy)
        self.model = model
        self.optimizer = keras.optimizers.get(optimizer)
        check_independent(self.optimizer, "a pipeline stage")
        self._loss = keras.losses.get(loss)
        self._is_sum = is_summed(self._loss)
        self._micro_batches = _parse_micro_batches(micro_batches)
        stage = every.index(runtime.rank())
        self._before = every[stage - 1] if stage > 0 else None
        self._after = every[stage + 1] if stage + 1 < len(every) else None
        self._channel = StageChannel(self._before, self._after)
        if self._after is not None or self._micro_batches > 1:
            _check_unmasked(model)
        if self._after is None and self._loss is None:
            remedy = 'Pass for example "mse"; other stages ignore the loss.'
            raise _error("a loss on the last stage", "loss=None", remedy)

    def train_on_batch(self, x: Any = None, y: Any = None) -> float:
        """Trains all stages on a batch. Collective: every stage of the pipeline; blocks.

        Args:
            x: array of inputs, of shape `(samples, ...)`; used by the first stage only. Defaults
                to `None`.
            y: array of targets, of shape `(samples, ...)`; used by the last stage only. Defaults
                to `None`.

        Returns:
            The loss of the batch, without regularization losses; the same on all stages.

        Raises:
            ArgumentError: the first stage has no `x`, or the last no `y`; there are fewer samples
                than micro-batches; or the numbers of samples and targets differ.
            MismatchError: another stage made a different call or failed. An error on one stage
                ends the batch on all stages that have not finished it; then training may
                continue, unless there are replicas, which are not notified. After an interrupt
                the stages may have made different numbers of calls: create a new `Pipeline` on
                each of them.
            RankLostError: a rank has died.
        """
        loss, gradients = self.gradients(x, y)
        self.optimizer.apply(gradients, self.model.trainable_variables)
        return loss

    def gradients(self, x: Any = None, y: Any = None) -> tuple[float, list[Any]]:
        """Computes the loss and the gradients of a batch; the weights stay.

        Collective: every stage of the pipeline; blocks. Arguments and errors are those of
        `train_on_batch`.

        Returns:
            The loss, and the gradients of the trainable variables of this stage, in their order.
        """
        with self._channel.batch():
            return self._gradients(x, y)

    def _gradients(self, x: Any, y: Any) -> tuple[float, list[Any]]:
        inputs, targets = self._split(x, "x", self._before), self._split(y, "y", self._after)
        forward = [
            self._forward(number, samples, target)
            for number, (samples, target) in enumerate(zip(inputs, targets, strict=True))
        ]
        total = sum(samples for samples, _, _ in forward)
        gradients, loss = None, 0.0
        for number in reversed(range(self._micro_batches)):
            samples, result, vjp = forward.pop()
            share = samples / total
            if self._after is None:
                factor = 1 if self._is_sum else share
                loss += factor * float(result)
                mine, upstream = vjp(np.full_like(result, factor), share)
            else:
                upstream = self._channel.recv(self._after, f"gradient of micro-batch {number}")
                mine, upstream = vjp(upstream, share)
            if self._before is not None:
                self._channel.send(upstream, self._before, f"gradient of micro-batch {number}")
            pairs = zip(gradients or mine, mine, strict=True)
            gradients = mine if gradients is None else [one + other for one, other in pairs]
        return self._share_loss(loss), gradients or []

    def predict_on_batch(self, x: Any = None) -> np.ndarray | None:
        """Computes the outputs of a batch. Collective: every stage of the pipeline; blocks.

        Args:
            x: array of inputs, of shape `(samples, ...)`; used by the first stage only. Defaults
                to `None`.

        Returns:
            The outputs on the last stage, `None` on other stages.

        Raises:
            ArgumentError: the first stage has no `x`.
            MismatchError: another stage made a different call or failed.
            RankLostError: a rank has died.
        """
        with self._channel.batch():
            return self._predict(x)

    def _predict(self, x: Any) -> np.ndarray | None:
        if self._before is None:
            inputs = np.asarray(_given(x, "x"))
        else:
            inputs = self._channel.recv(self._before, "inputs", last=True)
        outputs = self.model.predict_on_batch(inputs)
        if self._after is None:
            return outputs
        self._channel.send(outputs, self._after, "inputs", last=True)
        return None

    def _split(self, batch: Any, name: str, neighbour: int | None) -> Sequence[Any]:
        """Returns the micro-batches of an array that this stage uses, else of `None`."""
        if neighbour is not None:
            return [None] * self._micro_batches
        samples = len(_given(batch, name))
        if samples < self._micro_batches:
            expected = f"a batch of at least {self._micro_batches} samples, one per micro-batch"
            remedy = "Drop the incomplete last batch, or use fewer micro-batches."
            raise _error(expected, f"{samples}", remedy)
        return np.array_split(np.asarray(batch), self._micro_batches)

    def _forward(
        self, number: int, inputs: Any, target: Any
    ) -> tuple[int, np.ndarray, Callable[..., Any]]:
        """Runs a micro-batch; returns its number of samples, its outputs or loss, and its VJP."""
        if self._before is not None:
            inputs = self._channel.recv(self._before, f"micro-batch {number}")

        def loss(outputs: Any) -> Any:
            if len(outputs) != len(target):
                expected = f"targets for {len(outputs)} samples of micro-batch {number}"
                raise _error(expected, f"{len(target)}", "Pass the same batch to all stages.")
            values = self._loss(keras.ops.convert_to_tensor(target), outputs)
            return keras.ops.sum(values) if self._is_sum else keras.ops.mean(values)

        last = self._after is None
        result, vjp = _backends.active().vjp(
            self.model, inputs, loss if last else None, self._before is not None
        )
        if self._after is not None:
            self._channel.send(result, self._after, f"micro-batch {number}")
        return len(inputs), result, vjp

    def _share_loss(self, loss: float) -> float:
        if self._after is not None:
            loss = float(self._channel.recv(self._after, "loss", last=True))
        if self._before is not None:
            self._channel.send(np.float64(loss), self._before, "loss", last=True)
        return loss


def _given(batch: Any, name: str) -> Any:
    """Returns an argument that this stage uses."""
    if batch is None:
        remedy = "Pass x on the first stage and, to train, y on the last stage."
        raise _error(f"an array as {name} on this stage", "None", remedy)
    return batch


def _parse_ranks(ranks: Any) -> list[int]:
    """Checks and returns the ranks of a pipeline."""
    try:
        parsed = [operator.index(rank) for rank in ranks]
    except TypeError:
        parsed = []
    every = range(runtime.size())
    if runtime.rank() not in parsed or len({*every}.intersection(parsed)) < len(parsed):
        expected = f"ranks of 0 to {every[-1]}, each once, with this one among them"
        remedy = "Create on each rank the pipeline that the rank belongs to."
        raise _error(expected, f"ranks={ranks!r}", remedy)
    return parsed


def _parse_micro_batches(count: Any) -> int:
    """Checks and returns the number of micro-batches."""
    try:
        parsed = operator.index(count)
    except TypeError:
        parsed = 0
    if parsed < 1:
        expected = "micro_batches to be an integer of at least 1"
        raise _error(expected, repr(count), "Pass for example 4 times the number of stages.")
    return parsed


def _check_unmasked(model: Any) -> None:
    """Checks that outputs have no mask: masks are not sent, and a mean would ignore their sum."""
    outputs = outputs_of(model)
    if any(has_mask(output) for output in outputs):
        expected = (
            "a stage whose outputs have no mask, in a pipeline of several stages or micro-batches"
        )
        remedy = "Begin and end the mask within a stage, or remove mask_zero and Masking."
        raise _error(expected, f"model {model.name!r}, whose outputs are masked", remedy)


def _error(expected: str, received: str, remedy: str) -> errors.ArgumentError:
    where = f"{runtime.where()} keras_dist.Pipeline:"
    return errors.ArgumentError(where, expected, received, remedy)
