"""A fragment of the weights that local steps change, with its rounds and its outer optimizer.

The ranks average the differences to the anchors, the weights at the begin of the round, and the
outer optimizer takes the averages as gradients of the anchors.
"""

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
from keras import ops

from keras_dist import _backends, errors
from keras_dist._compat.keras.optimizer_state import trained_by
from keras_dist.training.model_state import untrained_zeros
from keras_dist.training.rank_gradients import key_of

# Share of the weights of a rank where an average arrives late, as in Streaming DiLoCo: without the
# averages ranks drift apart, and without their own weights the steps meanwhile are lost.
OWN_SHARE = 0.5


class Fragment:
    """Some of the weights of one optimizer; `outer` is `None` for plain averaging."""

    def __init__(self, outer: Any, reduction: Any):
        self.outer, self._reduction = outer, reduction
        self.weights: list[Any] = []
        self.anchors: list[Any] = []
        #: numbers of batches: those before this round, and those after which it ends
        self.began = self.due = 0
        self._arrives = 0  # the number of batches after which what was sent is due
        self._others: list[Any] = []
        self._sent: Any = None  # a function that waits for averages

    @property
    def variables(self) -> list[Any]:
        """What the ranks average."""
        return [*self.weights, *self._others]

    def build(self, weights: Sequence[Any], others: Sequence[Any]) -> None:
        """Takes weights, and others that are averaged without the outer optimizer."""
        self.weights, self._others = list(weights), list(others)
        self.anchors = [untrained_zeros(v, v.shape, "_anchor") for v in self.variables]
        if self.outer is None:
            return
        self.outer.build(self.weights)
        if list(map(key_of, trained_by(self.outer))) != list(map(key_of, self.weights)):
            raise errors.CheckpointError(
                "a checkpoint of local steps with as many fragments",
                "an outer optimizer that was restored for other weights",
                "Pass to LocalSteps the fragments with which the checkpoint was written.",
            )

    def plan(self, due: int) -> None:
        """Makes a round begin whose end is due after a number of batches."""
        self.began, self.due, self._sent = 0, due, None

    def plan_next(self, taken: int, length: int, delay: int) -> None:
        """Plans the round after one that has ended."""
        self.began, self._arrives = taken, taken + delay
        while self.due <= taken:
            self.due += length

    def start(self) -> None:
        """Begins a round with the weights of now."""
        for anchor, variable in zip(self.anchors, self.variables, strict=True):
            # A step of JAX frees the arrays that it is given.
            anchor.assign(_copy(variable))

    def restore(self) -> None:
        """Gives the weights their values at the begin of the round."""
        for variable, anchor in zip(self.variables, self.anchors, strict=True):
            variable.assign(anchor)

    def end(self, share: float = 1.0) -> None:
        """Ends a round, to which this rank adds its `share`: all have equal weights. Collective."""
        differences = self._differences()
        if share != 1:
            differences = [each * share for each in differences]
        self._apply(self._reduction(differences, self.anchors))

    def send(self) -> None:
        """Begins to average in the background. Collective; does not block."""
        # TensorFlow keeps functions of the host until the process ends.
        queue = functools.partial(Fragment._queue, weakref.proxy(self))
        _backends.active().call_host(queue, self._differences(), [()] * len(self.anchors))

    def _queue(self, *differences: np.ndarray) -> list[np.ndarray]:
        copies = [np.array(each) for each in differences]
        self._sent = self._reduction.queue(copies, self.anchors)
        return [np.zeros((), each.dtype) for each in differences]

    @property
    def is_sent(self) -> bool:
        """Whether averages are on their way."""
        return self._sent is not None

    def has_arrived(self, taken: int) -> bool:
        """Returns whether averages are due that were sent."""
        return self.is_sent and taken >= self._arrives

    def receive(self, mixes: bool = True) -> None:
        """Gives the weights the common values, mixed with those of now if it `mixes`. Blocks."""
        own = [_copy(variable) for variable in self.variables]
        anchors = [ops.convert_to_tensor(anchor) for anchor in self.anchors]
        shapes = [tuple(anchor.shape) for anchor in self.anchors]
        take = functools.partial(Fragment._take, weakref.proxy(self))
        self._apply(_backends.active().call_host(take, anchors, shapes))
        self.start()
        if mixes:
            for variable, value in zip(self.variables, own, strict=True):
                common = ops.convert_to_tensor(variable)
                _assign(variable, OWN_SHARE * value + (1 - OWN_SHARE) * common)

    def _take(self, *_: np.ndarray) -> list[np.ndarray]:
        sent, self._sent = self._sent, None
        averages: list[np.ndarray] = sent()
        return averages

    def _differences(self) -> list[Any]:
        pairs = zip(self.anchors, self.variables, strict=True)
        return [ops.stop_gradient(ops.subtract(anchor, v)) for anchor, v in pairs]

    def _apply(self, averages: Sequence[Any]) -> None:
        """Gives the weights the values that the ranks have in common."""
        self.restore()
        count = 0
        if self.outer is not None:
            count = len(self.weights)
            self.outer.apply(averages[:count], self.weights)
        # An outer optimizer applies the constraints of its weights.
        for variable, average in zip(self.variables[count:], averages[count:], strict=True):
            _assign(variable, ops.subtract(variable, average))


def cut(weights: Sequence[Any], count: int) -> list[list[Any]]:
    """Cuts weights into fragments of similar size, the same on all ranks."""
    fragments: list[list[int]] = [[] for _ in range(count)]
    sizes = [0] * count
    # The largest first, each to the smallest fragment.
    for number in sorted(range(len(weights)), key=lambda at: -_size(weights[at])):
        smallest = sizes.index(min(sizes))
        fragments[smallest].append(number)
        sizes[smallest] += _size(weights[number])
    return [[weights[number] for number in sorted(numbers)] for numbers in fragments]


def _size(variable: Any) -> int:
    return max(1, int(np.prod(variable.shape)))


def _copy(variable: Any) -> Any:
    return ops.copy(ops.stop_gradient(ops.convert_to_tensor(variable)))


def _assign(variable: Any, value: Any) -> None:
    variable.assign(value if variable.constraint is None else variable.constraint(value))
