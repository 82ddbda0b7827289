"""The updates of an optimizer that makes local steps: they count, and end rounds."""

import functools
from typing import Any

from keras_dist import errors


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
