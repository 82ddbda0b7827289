"""Backends: tensors of a framework as numpy arrays of the host and back, one module a framework."""

import contextlib
import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from keras_dist import errors
from keras_dist._compat import contract
from keras_dist._compat.python import replaced

HostFunction = Callable[[np.ndarray], np.ndarray]
OfTensor = Callable[[Any], Any]

SUPPORTED = ("tensorflow", "jax", "torch")
_named: list[str] = []  # frameworks that scripts of this process use, possibly without Keras


def overrides(model: Any, name: str) -> bool:
    """Returns whether a model has another method of a name than those of Keras."""
    import keras

    return bool(getattr(model, name) != getattr(keras.Model, name).__get__(model))


@contextlib.contextmanager
def uncompiled_step(model: Any, name: str, step: Callable[..., Any]) -> Iterator[None]:
    """Returns a context in which Keras takes another step of a model, and does not compile it."""
    model.jit_compile = False
    try:
        with replaced(model, **{name: step}):
            yield
    finally:
        model.jit_compile = True


class Backend(Protocol):
    """What each framework does in its own way; what it may leave out has a default."""

    name: str

    def pin_device(self, local_rank: int, local_size: int) -> str | None:
        """Makes this process use its local rank's GPU, if none is chosen; returns a warning."""

    def gpu_number(self) -> int | None:
        """Returns the GPU of this process among those that the driver shows to it; `None`: none."""

    def limit_threads(self, count: int, override: bool) -> None:
        """Sets the size of the compute pool, unless it runs, or is set and `override` is false."""

    def finish_calls(self) -> None:
        """Waits for host callbacks of programs of this thread; by default they have returned."""
        return

    def host_array(self, tensor: Any) -> np.ndarray:
        """Returns the array of a tensor, in place: only to be read, and before the next step."""

    def engine_arrays(self, tensors: Sequence[Any]) -> list[Any]:
        """Returns tensors as arrays, all on the host or all in GPU memory; see `host_array`."""

    def tensor_of(self, array: Any, like: Any) -> Any:
        """Returns an array of the engine as a tensor that is where another one is."""

    def reduce_gradients(
        self,
        gradients: Sequence[Any],
        names: Sequence[str],
        variables: Sequence[Any],
        plan: Callable[..., Any],
        reduce_slices: Callable[[str, np.ndarray, np.ndarray], Sequence[np.ndarray]],
        when: Any = None,
    ) -> list[Any]:
        """Adds the reduction of gradients to the train step.

        Args:
            plan: a function of the indices of the dense gradients, in the order in which
                backpropagation produces them, of their (shape, dtype) pairs, and optionally of
                `at_once`: whether they are all there before the first bucket is reduced, and
                `knows_rows`: whether those of embeddings may be given by their rows. It
                returns a numpy function of all of them, with the attributes `buckets`,
                `reduce_bucket(number, arrays)`, `reduce_buckets(parts)` (of all),
                `queue_bucket(number, arrays)` (which does not block), `overlaps` (whether to queue
                buckets), `rows_of_tables()` (how many rows of each array may be given), `by_rows(
                values, indices, shape)` (what gives them) and `weak()` (a function that returns it,
                for graphs that outlive it).
        """

    def as_tensors(self, gradients: Sequence[Any]) -> list[Any]:
        """Returns gradients, or `None`, as the tensors that Keras would make of them."""

    def form_of(self, gradient: Any) -> tuple[str, str | None]:
        """Returns the dtype of a gradient, and that of its indices if it is sparse."""

    def zeros(self, variable: Any, form: tuple[str, str | None]) -> Any:
        """Returns a gradient of zeros for a variable; a sparse one has no rows."""

    def is_traced(self, gradients: Sequence[Any], variables: Sequence[Any]) -> bool:
        """Returns whether gradients, or `None`, are those of a step that is being compiled."""
        return False

    def differentiable_host_callback(
        self,
        tensor: Any,
        forward: HostFunction,
        backward: HostFunction,
        on_device: bool = False,
        again: HostFunction | None = None,
    ) -> Any:
        """Adds a host function, called in program order, and its gradient, in reverse order."""

        def run(given: Any) -> Any:
            return self.run_on_host(forward, given, on_device)

        def back(gradient: Any) -> Any:
            # The gradient of `backward`.
            then = again or forward
            return self.differentiable_host_callback(gradient, backward, then, on_device)

        return self.differentiable(run, back, tensor)

    def differentiable(self, run: OfTensor, back: OfTensor, given: Any) -> Any:
        """Runs a function of a tensor whose gradient is `back`, of the gradient of its result."""

    def run_on_host(self, function: HostFunction, tensor: Any, on_device: bool) -> Any:
        """Adds a host function of a tensor to a train step, or calls it."""

    def call_uncompiled(self, function: Callable[[], Any]) -> Any:
        """Calls a function as it is where the framework compiles the Python code of its caller."""
        return function()

    def eagerly(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which operations run at once, also where a step is traced."""
        return contextlib.nullcontext()

    def call_host(
        self,
        function: Callable[..., Sequence[np.ndarray]],
        tensors: Sequence[Any],
        shapes: Sequence[tuple[int, ...]],
    ) -> list[Any]:
        """Adds a host function of several arrays, with results of `shapes`, to a train step."""

    def after(self, earlier: Any, tensors: Sequence[Any]) -> list[Any]:
        """Returns tensors that are computed only after another; by default they are, as called."""
        return list(tensors)

    def coalesce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Sums the rows of equal index in sparse gradients; by default all gradients are dense."""
        # If a row occurs twice, Keras' optimizers square each occurrence, not the sum. A reduction
        # over several ranks sums such rows anyway, and one rank must give the same steps.
        return list(gradients)

    def as_dense(self, gradients: Sequence[Any]) -> list[Any]:
        """Makes sparse gradients dense; rows of equal index are summed."""
        return list(gradients)

    def multiply(self, gradients: Sequence[Any], factor: float) -> list[Any]:
        """Multiplies gradients, dense or sparse, by a number; they keep their dtypes."""
        return [gradient * factor for gradient in gradients]

    def end_update(
        self, gradients: Sequence[Any], variables: Sequence[Any], state: Sequence[Any]
    ) -> None:
        """Called after an update of variables and of an optimizer's state in a train step."""
        return

    def check_model(self, model: Any) -> None:
        """Checks that nothing else averages a model's gradients; by default nothing does."""
        return

    def train_step_for_host(
        self,
        model: Any,
        with_rows: Callable[[Any], contextlib.AbstractContextManager[None]],
        takes_rows: bool,
    ) -> contextlib.AbstractContextManager[Callable[[], Any] | None]:
        """Returns a context in which Keras makes a train function that may call the host.

        Its value makes the context in which each call of the function runs, if there is one. Where
        the reduction takes rows, gradients of embeddings may be sparse.
        """

    def test_step_for_host(self, model: Any) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which Keras makes a test function that may call the host."""
        return contextlib.nullcontext()

    def between_steps(
        self,
        work: Callable[[], None],
        model: Any = None,
        values: tuple[Any, ...] = (),
        others: Sequence[Any] = (),
    ) -> tuple[Any, ...]:
        """Calls a function that assigns variables, `others` as well, between two train steps.

        Returns `values`, the arguments or results of a train function of the model, as assigned:
        those of JAX have the state of the model in place of its variables.
        """
        work()
        return values

    def when(self, condition: Any, work: Callable[[], None]) -> None:
        """Calls a function that assigns variables if a boolean tensor of the step is true."""
        if condition:
            work()

    def skip_batches(self, count: int, logs: dict[str, Any], *arguments: Any) -> Any:
        """Takes the batches of a call of the train function without training on them."""

    def first_batch(self, count: int, *arguments: Any) -> tuple[Any, tuple[Any, ...]]:
        """Returns the next batch, if accessible, and the arguments to pass on, which include it."""

    def build_from(self, model: Any, batches: Any) -> None:
        """Creates a model's variables from the shapes of its data; by default Keras has done so."""
        return

    def build_metrics(self, model: Any, batches: Any) -> None:
        """Creates metrics that `compile` knows by name; by default Keras has done so."""
        return


def active() -> Backend:
    """Returns the backend of Keras in this process; imports Keras."""
    try:
        import keras
    except ModuleNotFoundError as error:
        raise errors.LaunchError(
            "[keras_dist]",
            f"Keras to find its backend, {os.environ.get('KERAS_BACKEND', SUPPORTED[0])} unless "
            "its configuration file names another",
            f"no module {error.name!r}",
            "Set KERAS_BACKEND to a backend that is installed, or install one, for example: "
            "pip install 'keras_dist[torch]'. keras-dist doctor names those that are installed.",
        ) from error

    name = keras.backend.backend()
    if name not in SUPPORTED:
        raise errors.LaunchError(
            "[keras_dist]",
            f"the Keras backend to be {' or '.join(SUPPORTED)}",
            repr(name),
            f"Set KERAS_BACKEND={SUPPORTED[0]} before Keras is imported.",
        )
    return load(name)


def use(name: str) -> None:
    """Registers a framework that scripts of this process use without Keras."""
    if name not in _named:
        _named.append(name)


def in_use() -> list[Backend]:
    """Returns the backends, registered or of Keras, whose devices and threads this process uses."""
    backends = [load(name) for name in _named]
    if (not backends or "keras" in sys.modules) and active() not in backends:
        backends.append(active())
    return backends


@functools.cache  # AutoGraph does not trace cached functions
def load(name: str) -> Backend:
    """Returns the backend of a framework, which is imported."""
    try:
        return importlib.import_module(f"keras_dist._backends.{name}").backend
    except ImportError:
        contract.check(name)  # raises the error that names what the framework lacks
        raise
