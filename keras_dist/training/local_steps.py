"""`LocalSteps`: the argument of `DistributedOptimizer` for averages once in a number of steps."""

import dataclasses
import numbers
from typing import Any

import keras

from keras_dist import _engine, errors, runtime
from keras_dist.ops.reduction_options import ReductionOptions
from keras_dist.runtime.process_sets import ProcessSet, global_process_set
from keras_dist.training.saved_options import KeepsOptions, find_set

# The outer optimizer of DiLoCo, with less momentum: 0.7 and 0.9 overshoot in rounds of few steps.
NESTEROV = {"learning_rate": 1.0, "momentum": 0.5, "nesterov": True}
NODE = "node"
OUTER = "Omit it, or pass for example keras.optimizers.SGD(1.0)."


class LocalSteps:
    """Ranks take steps of their own, and average their weights once in a number of steps.

    For links that are too slow to average gradients in each step, see
    [Slow links](../slow-links.md). In a round, each rank takes `steps` steps with its own
    gradients, without communication. Then the difference between the weights at the begin of the
    round and now is averaged over the ranks, and an outer optimizer applies it, as if it were a
    gradient, to the weights at the begin. The weights of all ranks are then equal to the bit, and
    the next round begins with them. This is DiLoCo (Douillard et al., 2023), with `outer=None` it
    is Local SGD (Stich, 2019).

    Within a round, weights differ between ranks. The state of the optimizer is that of each rank,
    also between rounds. A round also ends at the end of an epoch of `fit`, and before a callback of
    keras_dist writes a checkpoint: validation, saved models and `EarlyStopping` see equal weights.
    Moving statistics, such as those of `BatchNormalization`, and averaged weights (`use_ema`) are
    averaged at the end of a round as well.

    Args:
        steps: number of steps in a round, at least 1. Batches whose gradients are accumulated count
            as one step; a step that a loss scale skips counts. With `steps_per_execution`, a round
            ends with the execution in which its last step falls. Defaults to 16.
        outer: the outer optimizer: an instance of a Keras optimizer, which is copied, its name or
            its configuration; `None` for plain averaging of the weights. Defaults to
            `"nesterov"`: `keras.optimizers.SGD(1.0, momentum=0.5, nesterov=True)`.
        within: the ranks that average their gradients in each step, as without local steps:
            `"node"` for those of one node, or a `ProcessSet` that contains this rank. Their
            weights stay equal in a round. `"node"` makes `DistributedOptimizer` collective.
            Defaults to `None`: each rank takes steps of its own.
        fragments: number of fragments into which the weights are cut, whole variables of similar
            size. Each has rounds of `steps` steps and an outer optimizer of its own. The rounds end
            after different steps, so that each message is smaller by this factor. At most `steps`
            and the number of weights. Defaults to 1.
        delay: number of steps that each rank takes while the averages travel in the background;
            then it takes the mean of its weights and those that the ranks have in common. At least
            0 and less than `steps`. Defaults to 0: ranks wait for the averages.

    With `fragments` and `delay` this is Streaming DiLoCo (Douillard et al., 2025). All ranks have
    equal weights then where a round ends early, as at the end of an epoch, and not in between.

    Raises:
        ArgumentTypeError: `steps`, `fragments` or `delay` is not an integer, `outer` is no
            optimizer, or `within` is neither `"node"` nor a `ProcessSet`.
        ArgumentError: `steps` is less than 1, or `fragments` or `delay` is out of range.

    Example:
    ```python
    local_steps = keras_dist.LocalSteps(64)
    optimizer = keras_dist.DistributedOptimizer(keras.optimizers.Adam(), local_steps=local_steps)
    model.compile(optimizer, loss="mse")
    ```
    """

    steps: int
    within: Any
    fragments: int
    delay: int
    _outer: dict[str, Any] | None

    def __init__(
        self,
        steps: int = 16,
        *,
        outer: Any = "nesterov",
        within: Any = None,
        fragments: int = 1,
        delay: int = 0,
    ):
        self.steps = _count("a number of local steps", steps, 1, "Pass for example 64.")
        self.fragments = _count("a number of fragments", fragments, 1, "Omit it for 1.", self.steps)
        self.delay = _count("the steps of a delay", delay, 0, "Omit it for 0.", self.steps - 1)
        if not (within is None or within == NODE or isinstance(within, ProcessSet)):
            expected = "within to be 'node', a ProcessSet or None"
            raise errors.ArgumentTypeError(expected, repr(within), "Omit it.")
        self.within = within
        self._outer = _configuration(outer)

    def make_outer(self) -> Any:
        """Returns a new outer optimizer; `None` for plain averaging."""
        return None if self._outer is None else keras.optimizers.deserialize(self._outer)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments as JSON values; a process set as the ranks of its group."""
        within: Any = self.within
        if isinstance(within, ProcessSet):
            within = [list(ranks) for ranks in runtime.ranks_of(within)]
        streaming = {"fragments": self.fragments, "delay": self.delay}
        return {"steps": self.steps, "outer": self._outer, "within": within, **streaming}

    def __repr__(self) -> str:
        outer, within = None, self.within
        if self._outer is not None:
            config = {k: v for k, v in self._outer["config"].items() if k != "name" and v}
            outer = f"{self._outer['class_name']}({config})"
        if isinstance(within, ProcessSet):
            within = "a process set"
        streaming = f"fragments={self.fragments}, delay={self.delay}"
        return f"LocalSteps({self.steps}, outer={outer}, within={within!r}, {streaming})"


def with_local_steps(options: ReductionOptions, value: Any) -> ReductionOptions:
    """Returns options with `local_steps`. Collective with `within="node"`: all ranks; blocks."""
    if value is None:
        return options
    if isinstance(value, dict):
        saved = value["within"]
        within = find_set(saved) if isinstance(saved, list) else saved
        found = LocalSteps(**value | {"within": within})
    else:
        found = value if isinstance(value, LocalSteps) else LocalSteps(value)
    within = found.within
    if options.op is not _engine.ReduceOp.AVERAGE:
        _refuse("op=Average", f"op={options.op.value}", "Omit op: the ranks average weights.")
    if options.shard_state:
        received = "shard_state=True, by which no rank can take a step of its own"
        _refuse("the whole state of the optimizer on each rank", received, "Omit shard_state.")
    if within == NODE:
        if options.process_set not in (None, global_process_set):
            remedy = "Pass within=keras_dist.ProcessSet(...) of the ranks of each node in the set."
            _refuse("all ranks to average, with within='node'", "a process_set", remedy)
        within = _set_of_node()
    if within is not None and not runtime.includes_me(within):
        remedy = "Make sets that together have all ranks, and pass on each rank the one it is in."
        _refuse("this rank to be in the process set within", repr(within), remedy)
    return dataclasses.replace(options, local_steps=found, within=within)


def _count(what: str, value: Any, least: int, remedy: str, most: int | None = None) -> int:
    """Returns an argument that is a number of steps or fragments, checked."""
    expected = f"{what}, {least} or more" + ("" if most is None else f" and at most {most}")
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        received = f"{value!r} of type {type(value).__name__}"
        raise errors.ArgumentTypeError(expected, received, remedy)
    number = int(value)
    if number < least or (most is not None and number > most):
        raise errors.ArgumentError(expected, repr(value), remedy)
    return number


def _refuse(expected: str, received: str, remedy: str) -> None:
    expected = f"{expected}, with local_steps"
    raise errors.ArgumentError(expected, received, remedy)


def _set_of_node() -> ProcessSet:
    """Returns the process set of the ranks of this node. Collective; blocks."""
    nodes = runtime.communicator().topology.nodes
    if len(nodes) == 1:
        return global_process_set
    sets = [
        runtime.find_process_set([tuple(ranks)]) or runtime.add_process_set(ranks)
        for ranks in nodes
    ]
    [own] = [each for each in sets if each.included()]
    return own


def _configuration(outer: Any) -> dict[str, Any] | None:
    if outer is None:
        return None
    if outer == "nesterov":
        outer = keras.optimizers.SGD(**NESTEROV)
    try:
        made = keras.optimizers.get(outer)
    except (TypeError, ValueError) as error:
        raise errors.ArgumentTypeError(
            "outer to be a Keras optimizer, its name, its configuration or None",
            f"{outer!r} of type {type(outer).__name__}",
            OUTER,
        ) from error
    if isinstance(made, KeepsOptions):
        raise errors.ArgumentError("an outer optimizer that is not distributed", repr(outer), OUTER)
    config: dict[str, Any] = keras.optimizers.serialize(made)
    return config
