"""Check that the ranks call `fit` with equal arguments where one would wait forever otherwise."""

import collections
import contextlib
import functools
import os
from collections.abc import Iterator
from typing import Any

import keras

from keras_dist import _engine, errors, runtime
from keras_dist.data import epochs
from keras_dist.data.fit_data import shapes_of_batches
from keras_dist.data.nested import is_tf_dataset
from keras_dist.runtime.process_sets import ProcessSet, format_ranks, global_process_set
from keras_dist.training.distributed import distributed_optimizers
from keras_dist.training.fit_session import Order, members, running_in
from keras_dist.training.rank_exchanges import allgather_object

OPERATION = "the begin of fit with the callbacks of keras_dist"
# The attribute of each callback of Keras with the path that it writes to, on every rank.
PATHS = {
    "BackupAndRestore": "backup_dir",
    "CSVLogger": "filename",
    "ModelCheckpoint": "filepath",
    "OrbaxCheckpoint": "directory",  # of recent versions
    "TensorBoard": "log_dir",
}
SAME_CALLBACKS = (
    "Pass the callbacks of keras_dist on every rank. Wrap a callback for the root only in "
    "keras_dist.callbacks.RootOnly. Callbacks of Keras may be passed on some ranks only."
)


@contextlib.contextmanager
def within_set(process_set: ProcessSet | None, found: list[Any]) -> Iterator[None]:
    """Runs a call within a process set, to which all of its callbacks belong meanwhile."""
    before = [(member, member.root_rank, member.process_set) for member in found]
    try:
        for member in found if process_set is not None else ():
            member.train_within(process_set)
        with runtime.fit_within(process_set):
            yield
    finally:
        for member, *own in before:
            member.root_rank, member.process_set = own


def set_of(found: list[Any], model: Any) -> ProcessSet | None:
    """Returns the process set of a call's callbacks, or of the loop around; `None`: all ranks."""
    sets = {id(each): each for member in found if (each := member.process_set) is not None}
    if not sets:
        loop = None if found else running_in(model)
        return None if loop is None else loop.process_set
    if len(sets) > 1:
        raise errors.ArgumentError(
            "callbacks of one process set",
            " and ".join(format_ranks(each.ranks or ()) for each in sets.values()),
            "Pass the callbacks of one call of keras_dist.callbacks(process_set=...).",
        )
    [process_set] = sets.values()
    comm = runtime.communicator(process_set)
    for optimizer in distributed_optimizers(model):
        reduces_in = optimizer._keras_dist.options.process_set or global_process_set
        reducing = reduces_in.ranks or ()
        if not set(reducing) <= set(comm.ranks):
            raise errors.ArgumentError(
                f"an optimizer that averages over the ranks of the callbacks, "
                f"{format_ranks(comm.ranks)}",
                f"a {type(optimizer).__name__} that averages over {format_ranks(reducing)}",
                "Pass the same process_set to keras_dist.DistributedOptimizer and to "
                "keras_dist.callbacks.",
            )
    return process_set


def agree_on_fit(arguments: dict[str, Any]) -> tuple[bool, bool]:
    """Checks that all ranks call `fit` with equal arguments, if it has callbacks of keras_dist.

    Returns whether the data of all ranks has been sharded by `keras_dist.data`, and whether their
    batches are known to have equal shapes in each step. Collective; blocks.
    """
    # The data, its number of batches, `verbose`, and callbacks of Keras and of the user may differ.
    # Any rank may append such callbacks to those of keras_dist; they may stop training.
    if not members(flat(arguments)):
        if distributed_optimizers(arguments["self"]) and runtime.fit_size() > 1:
            _warn_of_weights()
        return True, False
    if runtime.fit_size() == 1:
        return True, False
    comm = runtime.fit_communicator()
    _engine.progress.acts_among(comm.ranks)
    asks = _put_in_order(arguments)
    data = epochs.is_sharded(arguments["x"]), shapes_of_batches(arguments)
    mine = _plan(arguments), data, asks, _written(arguments), _cache_files(arguments)
    gathered = allgather_object(mine, OPERATION)
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
    _check_files([files for *_, files in gathered])
    _warn_of_files([written for *_, written, _ in gathered])
    answers = zip(*(asks for _, _, asks, *_ in gathered), strict=True)
    for member, answer in zip(members(flat(arguments)), answers, strict=True):
        member.told(answer)
    sharded, shapes = zip(*(data for _, data, *_ in gathered), strict=True)
    return all(sharded), shapes[0] is not None and len(set(shapes)) == 1


@functools.cache
def _warn_of_weights() -> None:
    """Warns once that ranks may train different weights. Not a collective operation."""
    runtime.notify(
        "the callbacks of keras_dist in a fit with a distributed optimizer",
        "none; the initial weights are not broadcast, and metrics are those of each rank",
        "Pass callbacks=keras_dist.callbacks(...) to fit. Ignore this warning if the ranks "
        "start with equal weights.",
    )


def _written(arguments: dict[str, Any]) -> list[str]:
    """Returns the paths that callbacks of Keras, which do not know the ranks, write to."""
    return [
        f"{kind} of {os.path.abspath(str(vars(each)[attribute]))}"
        for each in flat(arguments)
        for kind, attribute in PATHS.items()
        if isinstance(each, getattr(keras.callbacks, kind, ())) and not members([each])
        if attribute in vars(each)  # a subclass may have a property instead
    ]


def _warn_of_files(gathered: list[list[str]]) -> None:
    """Warns of a path that callbacks of Keras write to on several ranks."""
    paths = collections.Counter(path for written in gathered for path in set(written))
    shared = sorted(path for path, ranks in paths.items() if ranks > 1)
    if shared:
        _warn_of_file(shared[0])


@functools.cache
def _warn_of_file(path: str) -> None:
    """Warns once of a path, although a script may call `fit` for each epoch."""
    runtime.notify(
        "callbacks that write files on one rank, or on each rank in a file of its own",
        f"keras.callbacks.{path}, on several ranks",
        "Use the BackupAndRestore and ModelCheckpoint of keras_dist.callbacks, and wrap others in "
        "keras_dist.callbacks.RootOnly.",
    )


def flat(arguments: dict[str, Any]) -> list[Any]:
    """Returns the callbacks among the arguments of a call."""
    callbacks = arguments.get("callbacks")
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return callbacks.callbacks
    return keras.tree.flatten(callbacks) if callbacks else []


def _put_in_order(arguments: dict[str, Any]) -> list[Any]:
    """Moves callbacks behind those that a user has appended; returns what members ask."""
    given = flat(arguments)
    orders = [each.order if members([each]) else Order.AS_GIVEN for each in given]
    is_list = isinstance(arguments["callbacks"], keras.callbacks.CallbackList)
    behind = len(given) if is_list or Order.STOPS not in orders else orders.index(Order.STOPS)
    places = sorted(range(len(given)), key=orders.__getitem__)
    appended = [given[at] for at in places if at > behind and not orders[at]]
    if appended:
        arguments["callbacks"] = given = [given[at] for at in places]
    return [member.asks(appended) for member in members(given)]


def _plan(arguments: dict[str, Any]) -> dict[str, str]:
    """Returns the arguments that must be equal, as text by name."""
    found = members(flat(arguments))
    validates = arguments["validation_data"] is not None or arguments["validation_split"]
    values = {
        **arguments,
        "validation_data": "some" if validates else "none",
        "validation_freq": arguments["validation_freq"] if validates else "none",
    }
    names = ["epochs", "initial_epoch", *(name for member in found for name in member.agrees_on)]
    plan = {"callbacks": ", ".join(map(_name, found))}
    return plan | {name: str(values[name]) for name in names}


def _name(member: Any) -> str:
    """Returns the name of the class of this package that a callback belongs to."""
    classes = [c for c in type(member).__mro__ if c.__module__.startswith("keras_dist.")]
    return classes[0].__name__


def agree_on_evaluate(arguments: dict[str, Any]) -> None:
    """Checks that the ranks cache in files of their own. Collective: every rank; blocks."""
    if runtime.fit_size() > 1:
        _check_files(allgather_object(_cache_files(arguments), "the begin of evaluate"))


def _check_files(gathered: list[list[Any]]) -> None:
    """Checks what `_cache_files` returned on all ranks."""
    held = [each for files in gathered for each in files]
    if any(files for _, files in held):
        from keras_dist.data.tf_order import check_written

        check_written(held)


def _cache_files(arguments: dict[str, Any]) -> list[Any]:
    """Returns the files that the data sets of this rank write caches in."""
    given = [arguments.get(name) for name in ("x", "validation_data")]
    found = [data for data in given if is_tf_dataset(data)]
    if not found:
        return []
    from keras_dist.data.tf_order import held_files

    held = [held_files(data) for data in found]
    return [(held[0][0], [file for _, files in held for file in files])]
