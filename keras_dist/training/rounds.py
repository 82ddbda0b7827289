"""The rounds of an optimizer with local steps: what `LocalSteps` describes, for one optimizer.

A round keeps the weights with which it began, its anchors. At its end the ranks average the
differences to the anchors, and the outer optimizer takes the averages as gradients of the anchors.
Between the ends of rounds nothing is exchanged.

In `fit` the round ends between two calls of the train function, which `rounds_in_fit` counts; so a
compiled step is that of a single process. In loops written by hand the update counts, see
`LocalUpdates`. In a graph of TensorFlow the end is a branch of the update.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
from keras import ops

from keras_dist import _backends, _engine, errors, runtime
from keras_dist._compat.keras.optimizer_state import is_overwritten, trained_by
from keras_dist._compat.keras.sliced_updates import averages
from keras_dist.ops.gradient_plans import SAME_MODEL
from keras_dist.ops.reduction_options import ReductionOptions
from keras_dist.training.model_state import optimizers_inside, variable_name
from keras_dist.training.rank_gradients import key_of


class Rounds:
    """The rounds of one optimizer.

    Args:
        average: a function of differences and their anchors that reduces them like gradients.
    """

    def __init__(self, options: ReductionOptions, average: Callable[[Any, Any], list[Any]]):
        self.options, self._average = options, average
        self.outer = options.local_steps.make_outer()
        #: number of batches that this rank has taken in this round, and of rounds that have ended
        self.taken = self.ended = 0
        #: whether a step runs whose caller counts it
        self.is_entered = False
        self._length = 0
        self._weights: list[Any] = []
        self._others: list[Any] = []
        self._anchors: list[Any] = []
        self._counted: Any = None  # batches of this round, where a graph counts them

    @property
    def is_due(self) -> bool:
        """Whether the round has all of its steps."""
        return self.taken >= self._length

    @property
    def variables(self) -> list[Any]:
        """The variables of the rounds themselves, which no step changes."""
        return [*self._anchors, *([] if self.outer is None else self.outer.variables)]

    @property
    def weights(self) -> list[Any]:
        """The weights that the outer optimizer updates; none before the first step."""
        return self._weights

    def restart(self) -> None:
        """Forgets the steps of this round: all ranks are given new weights."""
        self.taken = 0
        if self._counted is not None:
            self._counted.assign(0)

    def build(self, optimizer: Any, statistics: Sequence[Any] = ()) -> None:
        """Finds what the ranks average: the weights of an optimizer, and statistics.

        Args:
            statistics: moving statistics of the model, if it is known.
        """
        members = [each for each in [optimizer, *optimizers_inside(optimizer)] if each.built]
        local = {key_of(variable) for variable in optimizer._keras_dist.local_variables()}
        shared = [each for each in trained_by(optimizer) if key_of(each) not in local]
        weights = [variable for variable in shared if not is_overwritten(variable)]
        others = [variable for variable in shared if is_overwritten(variable)]
        for member in members:
            if member.use_ema:
                pairs = zip(trained_by(member), averages(member), strict=True)
                others += [
                    each for of, each in pairs if each is not None and key_of(of) not in local
                ]
        others = list({id(each): each for each in [*others, *statistics]}.values())
        before = [*self._weights, *self._others]
        if list(map(id, before)) == list(map(id, [*weights, *others])):
            return
        self._compare()
        self._weights, self._others = weights, others
        passes = [member.gradient_accumulation_steps or 1 for member in members]
        self._length = self.options.local_steps.steps * max(passes)
        self._anchors = [self._anchor_of(variable) for variable in [*weights, *others]]
        self.taken = 0
        if self.outer is not None:
            self.outer.build(weights)

    def start(self) -> None:
        """Begins a round with the weights of now."""
        for anchor, variable in zip(self._anchors, [*self._weights, *self._others], strict=True):
            # A step of JAX frees the arrays that it is given.
            anchor.assign(ops.copy(ops.stop_gradient(ops.convert_to_tensor(variable))))

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Returns a context for steps that the caller counts."""
        before, self.is_entered = self.is_entered, True
        try:
            yield
        finally:
            self.is_entered = before

    def end(self, share: float = 1.0) -> None:
        """Ends a round: all ranks have equal weights afterwards. Collective; blocks.

        Args:
            share: factor of what this rank contributes to the average.
        """
        variables = [*self._weights, *self._others]
        pairs = zip(self._anchors, variables, strict=True)
        differences = [ops.stop_gradient(ops.subtract(anchor, v)) for anchor, v in pairs]
        if share != 1:
            differences = [each * share for each in differences]
        found = self._average(differences, self._anchors)
        count = len(self._weights)
        for variable, anchor in zip(variables, self._anchors, strict=True):
            variable.assign(anchor)
        if self.outer is None:
            count = 0
        else:
            self.outer.apply(found[:count], self._weights)
        for variable, difference in zip(variables[count:], found[count:], strict=True):
            average = ops.subtract(variable, difference)
            if variable.constraint is not None:  # an outer optimizer applies it
                average = variable.constraint(average)
            variable.assign(average)

    def end_counted(self, share: float = 1.0) -> None:
        """Ends a round of steps that were counted here, on the host. Collective; blocks."""
        self.end(share)
        self.taken, self.ended = 0, self.ended + 1

    def finish(self) -> None:
        """Ends a round that has begun, at the same place on all ranks. Collective; blocks."""
        if self._counted is not None:
            self.taken += int(self._counted)
            self._counted.assign(0)
        comm = self._ranks()
        places = [(self.ended, self.taken)]
        if comm is not None:
            places = _engine.collectives.allgather_object(
                comm, places[0], operation="the end of a round of local steps"
            )
        newest = max(places)
        took = sum(ended == newest[0] and taken > 0 for ended, taken in places)
        # A rank that took no step of this round has the anchors of the round before.
        if comm is not None and (took < len(places) if took else min(places) < newest):
            self._catch_up(comm, places)
        if took:
            share = len(places) / took if self.taken else 0.0
            _backends.active().between_steps(functools.partial(self.end_counted, share))

    def around(self, optimizer: Any, variables: Any, update: Callable[[], Any]) -> Any:
        """Makes an update of a loop that nobody else counts, and ends the round after its last."""
        if self.is_entered:
            return update()
        if not optimizer.built and variables is None:
            return update()  # Keras raises its own error
        if not optimizer.built:
            optimizer.build(variables)
        if not self.taken:
            self.build(optimizer)
        backend = _backends.active()
        with self.entered():
            if backend.is_traced((), variables or trained_by(optimizer)):
                return self._around_in_graph(update)
            if not self.taken:
                self.start()
            result = update()
            self.taken += 1
            if self.is_due:
                backend.between_steps(self.end_counted)
            return result

    def _around_in_graph(self, update: Callable[[], Any]) -> Any:
        backend = _backends.active()
        if self._counted is None:
            self._counted = keras.Variable("zeros", shape=(), dtype="int32", trainable=False)
        counted = self._counted
        backend.when(ops.equal(counted, 0), self.start)
        result = update()
        counted.assign(counted + 1)

        def end() -> None:
            self.end()
            counted.assign(0)

        backend.when(ops.greater_equal(counted, self._length), end)
        return result

    def _compare(self) -> None:
        """Checks that all ranks have the same rounds; others would average at other steps."""
        comm = self._ranks()
        if comm is None:
            return
        everyone = _engine.collectives.allgather_object(
            comm, repr(self.options.local_steps), operation="the begin of local steps"
        )
        for rank, received in zip(comm.ranks, everyone, strict=True):
            if received != everyone[0]:
                raise errors.MismatchError(
                    f"[rank {rank} of {comm.job.size}]",
                    f"{everyone[0]} as on rank {comm.ranks[0]}",
                    received,
                    "Pass the same local_steps to DistributedOptimizer on every rank.",
                )

    def _anchor_of(self, variable: Any) -> Any:
        name = f"{variable_name(variable)}_anchor"
        return keras.Variable(
            "zeros",
            shape=tuple(variable.shape),
            dtype=keras.backend.standardize_dtype(variable.dtype),
            trainable=False,
            name=name.replace("/", "_"),
        )

    def _ranks(self) -> _engine.Communicator | None:
        if not runtime.includes_me(self.options.process_set):
            return None
        comm = runtime.communicator(self.options.process_set)
        return comm if comm.size > 1 else None

    def _catch_up(self, comm: _engine.Communicator, places: Sequence[tuple[int, int]]) -> None:
        """Gives ranks that were out of data the state after the last round of the others."""
        backend, newest = _backends.active(), max(places)
        is_current = self.ended == newest[0] and (self.taken > 0 or not newest[1])
        if is_current and not self.taken:
            self.start()  # the anchors are those of the round before
        variables, names = self.variables, [variable_name(v) for v in self.variables]
        received = _engine.collectives.broadcast(
            comm,
            backend.engine_arrays([variable.value for variable in variables]),
            names,
            comm.ranks[list(places).index(newest)],
            operation="the broadcast of a round of local steps",
            remedy=SAME_MODEL,
        )
        if is_current:
            return
        for variable, array in zip(variables, received, strict=True):
            variable.assign(backend.tensor_of(array, variable.value))
        for variable, anchor in zip([*self._weights, *self._others], self._anchors, strict=True):
            variable.assign(anchor)
        self.taken, self.ended = 0, newest[0]


class LocalUpdates:
    """Mixin of an optimizer with local steps; precedes those that update and reduce."""

    _keras_dist: Any

    def apply(self, grads: Any, trainable_variables: Any = None, *rest: Any, **options: Any) -> Any:
        """Updates variables, and ends the round after its last update."""
        given = [] if trainable_variables is None else [list(trainable_variables)]
        update = functools.partial(super().apply, grads, *given, *rest, **options)  # type: ignore[misc]
        return self._keras_dist.rounds.around(self, given[0] if given else None, update)

    def stateless_apply(self, *given: Any, **named: Any) -> Any:
        """Returns updated variables, in a step of `fit` or `train_on_batch`."""
        if not self._keras_dist.rounds.is_entered:
            raise errors.UsageError(
                runtime.where(),
                "local steps in fit, in train_on_batch or by optimizer.apply",
                "stateless_apply in a loop written by hand, which cannot end a round",
                "Train with fit, or compile only the gradients and call optimizer.apply.",
            )
        return super().stateless_apply(*given, **named)  # type: ignore[misc]

    def finish_round(self) -> None:
        """Averages the weights of all ranks now, if they have taken steps since they last did.

        For loops written by hand: call it before the model is validated or saved, and at the end.
        `fit` does so at the end of each epoch.

        Collective: every rank, after the same number of steps; blocks.
        """
        self._keras_dist.rounds.finish()


@functools.cache
def local(mixin: Any) -> Any:
    """Returns a mixin of an optimizer whose updates are local steps."""
    return type(mixin.__name__, (LocalUpdates, mixin), {})
