"""Backends: the bridge from a framework's tensors to numpy arrays on the host.

One file a framework, the same functions in each (`Backend` below); none knows MPI. A
backend runs a numpy function on the host inside its own training step, and the engine is
such a function.
"""

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import numpy as np

from keras_dist import errors

__all__ = ["Backend", "active", "in_use", "use"]

OnHost = Callable[[np.ndarray], np.ndarray]

SUPPORTED = ("tensorflow", "jax", "torch")
_named: list[str] = []  # what scripts of this process use, perhaps without Keras


class Backend(Protocol):
    """What each backend module offers."""

    def pin_device(self, local_rank: int, local_size: int) -> str | None:
        """Makes this process use the GPU of its local rank.

        Does nothing without a GPU or when the user has chosen one.

        Returns:
            What went wrong, with the remedy; `None` when all is well.
        """

    def limit_threads(self, count: int, override: bool) -> None:
        """Sizes the compute pool, unless it is running or (without `override`) chosen."""

    def finish_calls(self) -> None:
        """Waits until programs that this thread has begun will call the host no more."""

    def reduce_gradients(
        self,
        gradients: Sequence[Any],
        names: Sequence[str],
        variables: Sequence[Any],
        plan: Callable[[Sequence[int], Sequence[tuple[tuple[int, ...], np.dtype]]], Any],
        reduce_slices: Callable[[str, np.ndarray, np.ndarray], Sequence[np.ndarray]],
        when: Any = None,
    ) -> list[Any]:
        """Puts the reduction of a gradient list into the training step.

        Args:
            gradients: the framework's tensors; none of them `None`.
            names: their variables' names, for messages.
            variables: the Keras variables that they are of.
            plan: takes the positions, in `gradients`, of the dense ones in the order in
                which they are ready, and their (shape, dtype) pairs; gives a numpy function
                of them all with `buckets`, `bound_to(number)`, a numpy function of one,
                `queue_bucket(number, arrays)`, which does not wait for it, and `overlaps`,
                which tells whether to do so.
            reduce_slices: takes name, values and indices of a sparse gradient, gives
                values and indices; a numpy function.
            when: whether to reduce in this step, equal on all ranks, where that is known
                only while the step runs; else gradients stay as they are. `None` for always.

        Returns:
            The reduced gradients, as the framework's tensors, in the order given.
        """

    def through_host(self, tensor: Any, forward: OnHost, backward: OnHost) -> Any:
        """Puts a function of the host, and its gradient, into a computation.

        A rank runs such functions in the order of the program, and those of gradients in the
        reverse order.

        Args:
            tensor: the framework's tensor.
            forward: takes its array, gives a new one of the same shape and dtype.
            backward: takes the gradient of that, gives that of the tensor; arrays as well.

        Returns:
            What `forward` gives, as the framework's tensor.
        """

    def after(self, earlier: Any, tensors: Sequence[Any]) -> list[Any]:
        """Returns tensors that a computation has only when it has another one.

        Args:
            earlier: the tensor that it has first, such as a result of the host.
            tensors: the framework's tensors, dense or sparse.
        """

    def pull_back(
        self, model: Any, inputs: np.ndarray, loss: Callable[[Any], Any] | None, through: bool
    ) -> tuple[np.ndarray, Callable[[np.ndarray, float], tuple[list[Any], np.ndarray | None]]]:
        """Runs a model as in training, and keeps what its gradients need.

        Args:
            model: a built Keras model.
            inputs: what it is given.
            loss: takes the framework's tensor of outputs, gives one number; `None` for none.
            through: whether the gradient of the inputs will be asked for.

        Returns:
            The loss, or the outputs where there is none; and a function that takes the gradient
            of these and a factor for penalties of layers, and gives the gradients of the
            trainable variables, as the framework's tensors, and that of the inputs, or `None`.
        """

    def add_up_rows(self, gradients: Sequence[Any]) -> list[Any]:
        """Does to sparse gradients what one rank has to do: adds up rows of equal index.

        Keras' optimizers take the square of each row, not of their sum, where a row occurs
        twice; several ranks add up rows anyway, and one rank must give the same steps.
        """

    def as_dense(self, gradients: Sequence[Any]) -> list[Any]:
        """Makes sparse gradients dense; rows of equal index are added up."""

    def multiply(self, gradients: Sequence[Any], factor: float) -> list[Any]:
        """Multiplies gradients, dense or sparse, by a number; they keep their dtypes."""

    def check_model(self, model: Any) -> None:
        """Makes sure that nobody else averages a model's gradients over processes.

        Raises:
            ArgumentError: the framework does.
            BackendError: Keras does, by the framework.
        """

    def train_step_for_host(self, model: Any) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which Keras makes a train function that may call the host.

        Args:
            model: a compiled Keras model with a distributed optimizer.
        """

    def pass_over(self, count: int, logs: dict[str, Any], *arguments: Any) -> Any:
        """Takes as many batches as a train function would, and trains on none of them.

        Args:
            count: how many.
            logs: those of the last of them.
            *arguments: what Keras passes to the train function.

        Returns:
            What the train function would, with these logs.
        """

    def first_batch(self, count: int, *arguments: Any) -> tuple[Any, tuple[Any, ...]]:
        """Looks at the batch that a train function is about to take.

        Args:
            count: how many it takes at once.
            *arguments: what Keras passes to the train function.

        Returns:
            The batch, as nested tensors, or `None` where it cannot be seen; what to pass to the
            train function now, in which the batch still is.
        """

    def build_from(self, model: Any, batches: Any) -> None:
        """Creates a model's variables from the shapes of its data, using up none of it.

        Args:
            model: a compiled Keras model that is not built.
            batches: what its train function takes.
        """


def active() -> Backend:
    """Returns the backend of Keras in this process; imports Keras.

    Raises:
        LaunchError: keras_dist does not work with that backend.
    """
    import keras

    name = keras.backend.backend()
    if name not in SUPPORTED:
        raise errors.LaunchError(
            errors.explain(
                "[keras_dist]",
                f"the Keras backend to be {' or '.join(SUPPORTED)}",
                repr(name),
                f"Set KERAS_BACKEND={SUPPORTED[0]} before Keras is imported.",
            )
        )
    return _load(name)


def use(name: str) -> None:
    """Takes note that scripts of this process use a framework by itself.

    Args:
        name: which of `SUPPORTED`.
    """
    if name not in _named:
        _named.append(name)


def in_use() -> list[Backend]:
    """Returns the backends whose devices and threads this process uses.

    Those of `use`; and that of Keras where it has been imported or there is no other.

    Raises:
        LaunchError: keras_dist does not work with the backend of Keras.
    """
    backends = [_load(name) for name in _named]
    if not backends or "keras" in sys.modules:
        of_keras = active()
        backends += [of_keras] if of_keras not in backends else []
    return backends


@functools.cache  # TensorFlow, tracing a user's function, leaves alone what is cached
def _load(name: str) -> Backend:
    return cast(Backend, importlib.import_module(f"keras_dist._backends.{name}"))
