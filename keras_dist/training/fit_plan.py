"""Check that the ranks call `fit` with equal arguments where these must be equal.

The callbacks of keras_dist synchronize at the begin and end of epochs and at validation. A rank
with more epochs, or with a validation that other ranks lack, would wait there forever.
"""

from typing import Any

import keras

from keras_dist import _engine, errors, runtime
from keras_dist.data import epochs
from keras_dist.data.equal_batches import shapes_of_batches
from keras_dist.data.kinds import is_tf_dataset

OPERATION = "the begin of fit with the callbacks of keras_dist"
AGREES = "AgreeOnStoppingCallback"
# Callbacks that act on the decisions of others, which run before them.
LAST = ("VerifyReplicas", AGREES, "PreemptionCallback")
COLLECTIVE_IN_VALIDATION = ("MetricAverageCallback", "AverageStatisticsCallback")
SAME_CALLBACKS = (
    "Pass the callbacks of keras_dist on every rank. Wrap a callback for the root only in "
    "keras_dist.callbacks.RootOnly. Callbacks of Keras may be passed on some ranks only."
)


def agree_on_fit(arguments: dict[str, Any]) -> tuple[bool, bool]:
    """Checks that all ranks call `fit` with equal arguments, if it has callbacks of keras_dist.

    The data, its number of batches, `verbose`, and callbacks of Keras and of the user may differ.
    Any rank may append such callbacks to those of keras_dist; they may stop training.

    Collective: every rank; blocks.

    Returns:
        Whether the data of all ranks has been sharded by `keras_dist.data`; `True` without
        callbacks of keras_dist. And whether the batches of all ranks are known to have equal shapes
        in each step; `False` without these callbacks.
    """
    ours = [
        name for callback in _flat(arguments["callbacks"]) if (name := _name(callback)) is not None
    ]
    if not ours or runtime.size() == 1:
        return True, False
    comm = runtime.communicator()
    data = epochs.is_sharded(arguments["x"]), shapes_of_batches(arguments)
    mine = _plan(arguments, ours), data, _put_in_order(arguments), _cache_files(arguments)
    gathered = _engine.collectives.allgather_object(comm, mine, operation=OPERATION)
    plans = [plan for plan, *_ in gathered]
    for rank, plan in enumerate(plans):
        for name, expected in plans[0].items():
            if plan.get(name) != expected:
                raise errors.MismatchError(
                    f"[rank {rank} of {comm.size}]",
                    f"{name}={expected} in fit as on rank 0",
                    f"{name}={plan.get(name)}",
                    SAME_CALLBACKS if name == "callbacks" else f"Pass the same {name}.",
                )
    _check_cache_files([held for *_, files in gathered for held in files])
    if any(asks for _, _, asks, _ in gathered):
        arguments["callbacks"] = [
            callback.after_batches() if _name(callback) == AGREES else callback
            for callback in _flat(arguments["callbacks"])
        ]
    sharded, shapes = zip(*(data for _, data, *_ in gathered), strict=True)
    return all(sharded), shapes[0] is not None and len(set(shapes)) == 1


def _cache_files(arguments: dict[str, Any]) -> list[Any]:
    """Returns the files that the data sets of this rank write caches in."""
    found = [arguments[name] for name in ("x", "validation_data") if is_tf_dataset(arguments[name])]
    if not found:
        return []
    from keras_dist.data.tf_caches import held_files

    held = [held_files(data) for data in found]
    return [(held[0][0], [file for _, files in held for file in files])]


def _check_cache_files(held: list[Any]) -> None:
    if any(files for _, files in held):
        from keras_dist.data.tf_caches import check_written

        check_written(held)


def _put_in_order(arguments: dict[str, Any]) -> bool:
    """Moves the callbacks of `LAST` behind callbacks that the user appended."""
    flat = _flat(arguments["callbacks"])
    found = [index for index, callback in enumerate(flat) if _name(callback) == AGREES]
    appended = [c for c in flat[found[-1] :] if _name(c) not in LAST] if found else []
    if not appended or isinstance(arguments["callbacks"], keras.callbacks.CallbackList):
        return False
    last = [callback for callback in flat if _name(callback) in LAST]
    arguments["callbacks"] = [callback for callback in flat if _name(callback) not in LAST] + last
    return flat[found[-1]].may_stop_at_batches(appended)


def _plan(arguments: dict[str, Any], ours: list[str]) -> dict[str, str]:
    """Returns the arguments that must be equal, as text by name."""
    plan = {"callbacks": ", ".join(ours)}
    plan.update({name: str(arguments[name]) for name in ("epochs", "initial_epoch")})
    if any(name in ours for name in COLLECTIVE_IN_VALIDATION):
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
    classes = [c for c in type(callback).__mro__ if c.__module__.startswith("keras_dist.")]
    return classes[0].__name__ if classes else None
