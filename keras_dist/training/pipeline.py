"""`Pipeline`: a model cut into stages, one on each rank, trained by micro-batches.

Stages tell each other activations and gradients; which ranks hold the same stage of another
replica, and average its gradients, is the optimizer's to know.
"""

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np

from keras_dist import _backends, _engine, errors, runtime
from keras_dist._compat.keras.models import has_mask, is_summed, outputs_of
from keras_dist.training.update_check import check_independent

__all__ = ["Pipeline"]

TOLD = 200  # characters of an error that other stages hear


class Pipeline:
    """A model of which each rank holds one part, for models that are too large for one device.

    A batch is cut into micro-batches. Each goes through all stages, from rank to rank, and a
    stage takes the next one while others work on the last; when all have come to the end their
    gradients go back the same way (GPipe). Then each stage makes one step of its optimizer, by
    the gradient of the mean loss of the whole batch: what the uncut model would do.

    Stages are not compiled, and one waits for another at the begin and the end of each batch: so
    there should be several times as many micro-batches as stages. `BatchNormalization` sees
    micro-batches. Keras' masks stay within a stage.

    Args:
        model: the stage of this rank, a Keras model that is built, with one input, of which the
            first dimension is that of samples, and one output.
        optimizer: the Keras optimizer of this stage, without a `global_clipnorm` or a loss scale,
            which would be those of one stage alone. With replicas of the whole pipeline on other
            ranks, a `DistributedOptimizer` with the process set of those that hold this stage.
        loss: a Keras loss, its name or a function, of which the mean over samples is taken, or
            the sum where its `reduction` is "sum"; only that of the last stage counts.
        micro_batches: into how many parts a batch is cut; the same on all stages. Defaults to 1.
        ranks: the ranks of the stages by their numbers in the job, first to last, this one among
            them. Defaults to all ranks.

    Raises:
        ArgumentError: `model` is not built, or its outputs have a mask; `optimizer` looks at
            several gradients at once, the last stage has no `loss`, `micro_batches` is no whole
            number from 1 on, or `ranks` are not ranks of the job, each once, with this one.

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
    Reference: Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline
    Parallelism", 2019.
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
            remedy = "Begin it with keras.Input(shape), or call its build."
            raise _error("a stage that is built", f"model {model.name!r}, which is not", remedy)
        self.model = model
        self.optimizer = keras.optimizers.get(optimizer)
        check_independent(self.optimizer, "a pipeline stage")
        self._loss = keras.losses.get(loss)
        self._adds_up = is_summed(self._loss)
        self._micro_batches = _parse_micro_batches(micro_batches)
        stage = every.index(runtime.rank())
        self._before = every[stage - 1] if stage > 0 else None
        self._after = every[stage + 1] if stage + 1 < len(every) else None
        self._neighbours = _Neighbours(self._before, self._after)
        if self._after is not None or self._micro_batches > 1:
            _check_unmasked(model)
        if self._after is None and self._loss is None:
            remedy = 'Pass for example "mse"; on other stages it does not count.'
            raise _error("a loss on the last stage", "loss=None", remedy)

    def train_on_batch(self, x: Any = None, y: Any = None) -> float:
        """Trains all stages on a batch. Every stage of the pipeline must call it; blocks.

        Args:
            x: the batch, an array; only that of the first stage counts. Defaults to `None`.
            y: its targets, an array; only those of the last stage count. Defaults to `None`.

        Returns:
            The loss of the batch, without penalties of layers; the same on all stages.

        Raises:
            ArgumentError: the first stage has no batch, or the last no targets; there are fewer
                samples than micro-batches, or not as many targets.
            MismatchError: another stage does something else, or has failed. What ends a batch on
                one stage ends it on all that are not through with it; then they may go on, unless
                there are replicas, which hear nothing of it. Stages that have made different
                numbers of calls, as after an interrupt, need a new `Pipeline` on each.
            RankLostError: a rank has died.
        """
        loss, gradients = self.gradients(x, y)
        self.optimizer.apply(gradients, self.model.trainable_variables)
        return loss

    def gradients(self, x: Any = None, y: Any = None) -> tuple[float, list[Any]]:
        """Does all of `train_on_batch` but the step; arguments and errors as there.

        Returns:
            The loss, and the gradients of the stage's trainable variables in their order.
        """
        with self._neighbours.batch():
            return self._gradients(x, y)

    def _gradients(self, x: Any, y: Any) -> tuple[float, list[Any]]:
        inputs, targets = self._parts(x, "x", self._before), self._parts(y, "y", self._after)
        passed = [
            self._forward(number, part, target)
            for number, (part, target) in enumerate(zip(inputs, targets, strict=True))
        ]
        total = sum(samples for samples, _, _ in passed)
        gradients, loss = None, 0.0
        for number in reversed(range(self._micro_batches)):
            samples, result, back = passed.pop()
            share = samples / total
            if self._after is None:
                factor = 1 if self._adds_up else share
                loss += factor * float(result)
                mine, theirs = back(np.full_like(result, factor), share)
            else:
                theirs = self._neighbours.recv(self._after, f"gradient of micro-batch {number}")
                mine, theirs = back(theirs, share)
            if self._before is not None:
                self._neighbours.send(theirs, self._before, f"gradient of micro-batch {number}")
            pairs = zip(gradients or mine, mine, strict=True)
            gradients = mine if gradients is None else [one + other for one, other in pairs]
        return self._share_loss(loss), gradients or []

    def predict_on_batch(self, x: Any = None) -> np.ndarray | None:
        """Sends a batch through all stages. Every stage of the pipeline must call it; blocks.

        Args:
            x: the batch; only that of the first stage counts. Defaults to `None`.

        Returns:
            The outputs on the last stage, else `None`.

        Raises:
            ArgumentError: the first stage has no batch.
            MismatchError: another stage does something else, or has failed.
            RankLostError: a rank has died.
        """
        with self._neighbours.batch():
            return self._predict(x)

    def _predict(self, x: Any) -> np.ndarray | None:
        if self._before is None:
            inputs = np.asarray(_given(x, "x"))
        else:
            inputs = self._neighbours.recv(self._before, "inputs", last=True)
        outputs = self.model.predict_on_batch(inputs)
        if self._after is None:
            return outputs
        self._neighbours.send(outputs, self._after, "inputs", last=True)
        return None

    def _parts(self, batch: Any, name: str, neighbour: int | None) -> Sequence[Any]:
        """Cuts a batch where this stage needs it: where no neighbour has it."""
        if neighbour is not None:
            return [None] * self._micro_batches
        samples = len(_given(batch, name))
        if samples < self._micro_batches:
            expected = f"a batch of at least {self._micro_batches} samples, one a micro-batch"
            remedy = "Leave out what is left of the data at its end, or cut into fewer."
            raise _error(expected, f"{samples}", remedy)
        return np.array_split(np.asarray(batch), self._micro_batches)

    def _forward(
        self, number: int, part: Any, target: Any
    ) -> tuple[int, np.ndarray, Callable[..., Any]]:
        """Returns how many samples a micro-batch has, its outputs or loss, and the way back."""
        if self._before is not None:
            part = self._neighbours.recv(self._before, f"micro-batch {number}")

        def loss(outputs: Any) -> Any:
            if len(outputs) != len(target):
                expected = f"targets for {len(outputs)} samples of micro-batch {number}"
                raise _error(expected, f"{len(target)}", "Give all stages the same batch.")
            values = self._loss(keras.ops.convert_to_tensor(target), outputs)
            return keras.ops.sum(values) if self._adds_up else keras.ops.mean(values)

        last = self._after is None
        result, back = _backends.active().vjp(
            self.model, part, loss if last else None, self._before is not None
        )
        if self._after is not None:
            self._neighbours.send(result, self._after, f"micro-batch {number}")
        return len(part), result, back

    def _share_loss(self, loss: float) -> float:
        if self._after is not None:
            loss = float(self._neighbours.recv(self._after, "loss", last=True))
        if self._before is not None:
            self._neighbours.send(np.float64(loss), self._before, "loss", last=True)
        return loss


def _given(batch: Any, name: str) -> Any:
    """Returns a batch that this stage needs.

    Raises:
        ArgumentError: it is missing.
    """
    if batch is None:
        remedy = "The first stage needs x, and to train the last one needs y."
        raise _error(f"an array as {name} on this stage", "None", remedy)
    return batch


def _parse_ranks(ranks: Any) -> list[int]:
    """Returns the ranks of a pipeline, checked."""
    try:
        parsed = [operator.index(rank) for rank in ranks]
    except TypeError:
        parsed = []
    every = range(runtime.size())
    if runtime.rank() not in parsed or len({*every}.intersection(parsed)) < len(parsed):
        expected = f"ranks of 0 to {every[-1]}, each once, with this one among them"
        remedy = "Each rank makes the pipeline that it is a stage of."
        raise _error(expected, f"ranks={ranks!r}", remedy)
    return parsed


def _parse_micro_batches(count: Any) -> int:
    """Returns a number of micro-batches, checked."""
    try:
        parsed = operator.index(count)
    except TypeError:
        parsed = 0
    if parsed < 1:
        expected = "micro_batches to be a whole number, 1 or more"
        raise _error(expected, repr(count), "Pass 4 times the number of stages.")
    return parsed


def _check_unmasked(model: Any) -> None:
    """Checks that no mask goes with the outputs: none is sent, and a mean would want its sum."""
    outputs = outputs_of(model)
    if any(has_mask(output) for output in outputs):
        expected = "a stage whose outputs have no mask, in a pipeline that cuts model or batches"
        remedy = "Let the mask begin and end within a stage, or leave out mask_zero and Masking."
        raise _error(expected, f"model {model.name!r}, which masks them", remedy)


class _Neighbours:
    """What goes to the stages before and after this one, batch by batch.

    Batches are counted, and messages named by their number: stages that are not in the same batch
    get an error, not each other's samples.

    Args:
        *ranks: those of the neighbours, `None` where there is none.
    """

    def __init__(self, *ranks: int | None):
        self._ranks = {rank for rank in ranks if rank is not None}
        self._waiting: set[int] = set()  # those that this batch still has something from or for
        self._batch = -1

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """Counts a batch; an error that ends it here ends it for neighbours that wait for it."""
        self._batch += 1  # before anything may fail, so that all stages go on with the same number
        self._waiting = set(self._ranks)
        try:
            yield
        except errors.RankLostError:
            raise
        except Exception as error:
            self._call_off(error)
            raise

    def send(self, array: Any, peer: int, name: str, last: bool = False) -> None:
        """Sends an array to a neighbour, as the `last` of the batch or not."""
        name = f"batch {self._batch}, {name}"
        with self._heard_of(peer, last):
            _engine.point_to_point.send(runtime.communicator(), np.asarray(array), peer, name, name)

    def recv(self, peer: int, name: str, last: bool = False) -> np.ndarray:
        """Receives an array from a neighbour, as the `last` of the batch or not."""
        name = f"batch {self._batch}, {name}"
        with self._heard_of(peer, last):
            return _engine.point_to_point.recv(runtime.communicator(), peer, name, name)

    @contextlib.contextmanager
    def _heard_of(self, peer: int, last: bool) -> Iterator[None]:
        try:
            yield
        except errors.ArgumentTypeError:  # before the two have met
            raise
        except Exception:  # behind it: the neighbour has met this rank, and maybe an error as well
            self._waiting.discard(peer)
            raise
        if last:
            self._waiting.discard(peer)

    def _call_off(self, error: Exception) -> None:
        why = str(error)
        if not isinstance(error, errors.KerasDistError):
            expected = f"batch {self._batch} to go through all stages of the pipeline"
            received = f"{type(error).__name__} ({' '.join(str(error).split())[:TOLD]})"
            why = errors.explain(runtime.where(), expected, received, "See the error of that rank.")
        for peer in sorted(self._waiting):
            with contextlib.suppress(Exception):  # what has failed first is what counts
                _engine.point_to_point.call_off(runtime.communicator(), peer, why)


def _error(expected: str, received: str, remedy: str) -> errors.ArgumentError:
    where = f"{runtime.where()} keras_dist.Pipeline:"
    return errors.ArgumentError(errors.explain(where, expected, received, remedy))
