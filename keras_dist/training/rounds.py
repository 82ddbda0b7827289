"""The rounds of an optimizer with local steps, see `LocalSteps` and decisions 75 and 76."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
from keras import ops

from keras_dist import _backends, _engine, errors
from keras_dist._compat.keras.optimizer_state import is_overwritten, trained_by
from keras_dist._compat.keras.sliced_updates import averages
from keras_dist.ops.gradient_plans import SAME_MODEL
from keras_dist.ops.reduction_options import ReductionOptions
from keras_dist.training.fragments import Fragment, cut
from keras_dist.training.model_state import optimizers_inside, variable_name
from keras_dist.training.rank_gradients import key_of


class Rounds:
    """The rounds of one optimizer, with the `GradientReduction` of differences of weights."""

    def __init__(self, options: ReductionOptions, reduction: Any):
        self.options, self.reduction = options, reduction
        steps = options.local_steps
        self.fragments = [Fragment(steps.make_outer(), reduction) for _ in range(steps.fragments)]
        #: whether rounds of some weights go on where those of others end
        self.streams = steps.fragments > 1 or steps.delay > 0
        #: number of batches that this rank has taken since it began with the weights of all, and of
        #: averages so far
        self.taken = self.ended = 0
        #: whether this rank is between two steps after which all ranks meet
        self.is_within = False
        #: whether a step runs whose caller counts it
        self.is_entered = False
        self._length = self._delay = 0
        self._averaged: list[Any] = []
        self._counted: Any = None  # batches of this round, where a graph counts them

    @property
    def is_due(self) -> bool:
        """Whether a round has all of its steps, or averages are due."""
        return any(
            self.taken >= each.due or each.has_arrived(self.taken) for each in self.fragments
        )

    @property
    def is_in_loop(self) -> bool:
        """Whether a graph counts the steps: then no others may be within its rounds."""
        return self._counted is not None

    @property
    def outers(self) -> list[Any]:
        """The outer optimizers, one for each fragment; none for plain averages."""
        return [each.outer for each in self.fragments if each.outer is not None]

    @property
    def variables(self) -> list[Any]:
        """The variables of the rounds themselves, which no step changes."""
        anchors = [anchor for each in self.fragments for anchor in each.anchors]
        return [*anchors, *(variable for outer in self.outers for variable in outer.variables)]

    @property
    def weights(self) -> list[Any]:
        """The weights that outer optimizers update; none before the first step."""
        return [weight for each in self.fragments for weight in each.weights]

    def restart(self) -> None:
        """Forgets the steps of this round: all ranks are given new weights."""
        self._reset()
        if self._counted is not None:
            self._counted.assign(0)

    def _reset(self) -> None:
        self.taken, self.is_within = 0, False
        for number, fragment in enumerate(self.fragments, 1):
            fragment.plan(number * self._length // len(self.fragments))

    def build(self, optimizer: Any, statistics: Sequence[Any] = ()) -> None:
        """Finds what ranks average: the weights of an optimizer, and statistics of its model."""
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
        if list(map(id, self._averaged)) == list(map(id, [*weights, *others])):
            return
        self._compare()
        passes = max(member.gradient_accumulation_steps or 1 for member in members)
        steps = self.options.local_steps
        self._length, self._delay = steps.steps * passes, steps.delay * passes
        self._build_fragments(weights, others)
        self._averaged = [*weights, *others]
        self._reset()

    def _build_fragments(self, weights: Sequence[Any], others: Sequence[Any]) -> None:
        count = len(self.fragments)
        if count > max(1, len(weights)):
            raise errors.ArgumentError(
                f"at most one fragment for each of {len(weights)} weights",
                f"fragments={count}",
                f"Pass fragments={max(1, len(weights))} or less to LocalSteps.",
            )
        parts = cut(weights, count)
        for number, (fragment, part) in enumerate(zip(self.fragments, parts, strict=True), 1):
            fragment.build(part, others if number == count else ())
        # A compression keeps its errors by the weights; it leaves the others alone.
        self.reduction.stands_for = {
            key_of(anchor): key_of(weight)
            for fragment in self.fragments
            for anchor, weight in zip(fragment.anchors, fragment.weights, strict=False)
        }
        self.reduction.feedback.keys = list(self.reduction.stands_for.values())

    def start(self) -> None:
        """Begins a round with the weights of now."""
        for fragment in self.fragments:
            fragment.start()

    def count(self, batches: int) -> None:
        self.taken, self.is_within = self.taken + batches, True

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Returns a context for steps that the caller counts."""
        before, self.is_entered = self.is_entered, True
        try:
            yield
        finally:
            self.is_entered = before

    def end_due(self) -> None:
        """Ends due rounds, takes due averages. Collective; blocks unless they may arrive later."""
        for fragment in self.fragments:
            if fragment.has_arrived(self.taken):
                fragment.receive()
        for fragment in self.fragments:
            if self.taken >= fragment.due:
                self.ended += 1
                self._end_round(fragment)
                fragment.plan_next(self.taken, self._length, self._delay)
        self.is_within = self.fragments[-1].began < self.taken
        if not self.streams:
            self._reset()

    def _end_round(self, fragment: Fragment) -> None:
        """Averages a fragment whose next round begins then, or lets averages arrive later."""
        if self._delay:
            fragment.send()
        else:
            fragment.end()
            if self.streams:
                fragment.start()

    def _receive_all(self) -> None:
        for fragment in self.fragments:
            if fragment.is_sent:
                # Without steps of its own since then, a rank has none to keep.
                fragment.receive(mixes=self.taken > fragment.began)

    def _end_all(self, share: float, place: Sequence[Any]) -> None:
        _, taken, begins = place
        for fragment, began in zip(self.fragments, begins, strict=True):
            if taken > began:
                fragment.end(share)
        self.ended += 1
        self._reset()

    def finish(self) -> None:
        """Ends a round that has begun, at the same place on all ranks. Collective; blocks."""
        if self._counted is not None:
            self._take_over(int(self._counted))
        backend = _backends.active()
        if self._delay:
            backend.between_steps(self._receive_all)
        comm = self.reduction.replicas()
        places = [(self.ended, self.taken, [each.began for each in self.fragments])]
        if comm is not None:
            places = _engine.collectives.allgather_object(
                comm, places[0], operation="the end of a round of local steps"
            )
        newest = max(places)
        took = sum(ended == newest[0] and taken > 0 for ended, taken, _ in places)
        # A rank that took no step of this round has the anchors of the round before.
        if comm is not None and (took < len(places) if took else min(places) < newest):
            self._catch_up(comm, places)
        if took:
            share = len(places) / took if self.taken else 0.0
            backend.between_steps(functools.partial(self._end_all, share, newest))

    def _take_over(self, counted: int) -> None:
        """Takes over what a graph has counted."""
        self.taken += counted
        self._counted.assign(0)
        for fragment in self.fragments:
            if counted >= fragment.due:
                fragment.began = counted - (counted - fragment.due) % self._length

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
            if self._counted is None and backend.is_traced((), variables or trained_by(optimizer)):
                self._count_in_graph()
            if self._counted is not None:  # so do steps outside of the graph
                return self._around_in_graph(update)
            if not self.taken:
                self.start()
            result = update()
            self.count(1)
            if self.is_due:
                backend.between_steps(self.end_due)
            return result

    def _count_in_graph(self) -> None:
        if self.taken:
            raise errors.UsageError(
                "a round of local steps to end before a tf.function takes its first step",
                f"a round of {self.taken} steps outside of the function",
                "Call optimizer.finish_round() before the function.",
            )
        self._counted = keras.Variable("zeros", shape=(), dtype="int32", trainable=False)

    def _around_in_graph(self, update: Callable[[], Any]) -> Any:
        backend, counted = _backends.active(), self._counted
        backend.when(ops.equal(counted, 0), self.start)
        result = update()
        counted.assign(counted + 1)
        for fragment in self.fragments:
            if self._delay:
                arrived = self._is_passed(counted, fragment.due + self._delay)
                backend.when(arrived, fragment.receive)
            end = functools.partial(self._end_in_graph, fragment)
            backend.when(self._is_passed(counted, fragment.due), end)
        return result

    def _is_passed(self, counted: Any, due: int) -> Any:
        """Returns whether the steps have come to a number that returns with each round."""
        again = ops.equal(ops.mod(counted - due, self._length), 0)
        return ops.logical_and(ops.greater_equal(counted, due), again)

    def _end_in_graph(self, fragment: Fragment) -> None:
        self._end_round(fragment)
        if not self.streams:
            self._counted.assign(0)

    def _compare(self) -> None:
        """Checks that all ranks have the same rounds; others would average at other steps."""
        comm = self.reduction.replicas()
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

    def _catch_up(self, comm: _engine.Communicator, places: Sequence[Any]) -> None:
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
        for fragment in self.fragments:
            fragment.restore()
        self._reset()
        self.ended = newest[0]


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
