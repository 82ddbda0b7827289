"""Check that the arguments of `fit` that must be equal on all ranks are.

The callbacks of keras_dist synchronize at the begin and end of epochs and at validation. A rank
with more epochs, or with a validation that others lack, would wait for the others there.
"""

from typing import Any

import keras

from keras_dist import _engine, errors, runtime
from keras_dist.data import epochs

__all__ = ["agree_on_fit"]

MEETING = "the begin of fit with the callbacks of keras_dist"
AGREES = "AgreeOnStoppingCallback"
LAST = (
    "VerifyReplicas",
    AGREES,
    "PreemptionCallback",
)  # they act on decisions of others
VALIDATE_TOGETHER = ("MetricAverageCallback", "AverageStatisticsCallback")
SAME_CALLBACKS = (
    "Pass those of keras_dist on every rank; one that is for the root alone goes into "
    "keras_dist.callbacks.RootOnly, and Keras' own may be in the list of one rank."
)


def agree_on_fit(arguments: dict[str, Any]) -> bool:
    """Checks that all ranks call `fit` alike, if it has callbacks of keras_dist.

    The data, its number of batches, `verbose`, and callbacks of Keras and of the user may differ.
    Such callbacks may be appended to those of keras_dist on any rank, and may stop training.
    Collective: every rank; blocks.

    Args:
        arguments: the arguments of `fit` by name, defaults included; `callbacks` is reordered.

    Returns:
        Whether the data of all ranks has been sharded by `keras_dist.data`; `True` without
        callbacks of keras_dist.

    Raises:
        MismatchError: arguments differ; raised on every rank with the same text.
    """
    ours = [name for one in _flat(arguments["callbacks"]) if (name := _name(one)) is not None]
    if not ours or runtime.size() == 1:
        return True
    comm = runtime.communicator()
    mine = _plan(arguments, ours), epochs.is_shared_out(arguments["x"]), _put_in_order(arguments)
    told = _engine.collectives.allgather_object(comm, mine, operation=MEETING)
    plans = [plan for plan, _, _ in told]
    for rank, plan in enumerate(plans):
        for name, expected in plans[0].items():
            if plan.get(name) != expected:
                raise errors.MismatchError(
                    errors.explain(
                        f"[rank {rank} of {comm.size}]",
                        f"{name}={expected} in fit as on rank 0",
                        f"{name}={plan.get(name)}",
                        SAME_CALLBACKS if name == "callbacks" else f"Pass the same {name}.",
                    )
                )
    if any(asks for _, _, asks in told):
        arguments["callbacks"] = [
            one.after_batches() if _name(one) == AGREES else one
            for one in _flat(arguments["callbacks"])
        ]
    return all(shared_out for _, shared_out, _ in told)


def _put_in_order(arguments: dict[str, Any]) -> bool:
    """Moves the callbacks of `LAST` behind callbacks that the user has appended.

    Returns:
        Whether an appended callback may stop training after a batch.
    """
    flat = _flat(arguments["callbacks"])
    places = [place for place, one in enumerate(flat) if _name(one) == AGREES]
    appended = [one for one in flat[places[-1] :] if _name(one) not in LAST] if places else []
    if not appended or isinstance(arguments["callbacks"], keras.callbacks.CallbackList):
        return False
    last = [one for one in flat if _name(one) in LAST]
    arguments["callbacks"] = [one for one in flat if _name(one) not in LAST] + last
    return flat[places[-1]].must_ask(appended)


def _plan(arguments: dict[str, Any], ours: list[str]) -> dict[str, str]:
    """Returns the compared arguments by name, as text for messages."""
    plan = {"callbacks": ", ".join(ours)}
    plan.update({name: str(arguments[name]) for name in ("epochs", "initial_epoch")})
    if any(name in ours for name in VALIDATE_TOGETHER):
        validates = arguments["validation_data"] is not None or arguments["validation_split"]
        plan["validation_data"] = "some" if validates else "none"
        plan["validation_freq"] = str(arguments["validation_freq"]) if validates else "none"
    return plan


def _flat(callbacks: Any) -> list[Any]:
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return callbacks.callbacks
    return keras.tree.flatten(callbacks) if callbacks else []


def _name(callback: Any) -> str | None:
    """Returns the name of the keras_dist class of a callback, or `None`."""
    classes = [one for one in type(callback).__mro__ if one.__module__.startswith("keras_dist.")]
    return classes[0].__name__ if classes else None
