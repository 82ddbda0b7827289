"""The contract with a framework: the names that keras_dist relies on, and a check that they exist.

A framework may rename what it does not document. Overridden under its old name, a method is never
called, and training would go on without the reduction. The check finds it before the first step.
"""

import dataclasses
import functools
import importlib
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from keras_dist import errors
from keras_dist._version import __version__

__all__ = ["Name", "check", "explain_missing", "missing"]


@dataclasses.dataclass(frozen=True)
class Name:
    """A name of a framework.

    Args:
        owner: returns the class or the module that has the name.
        name: the name.
        purpose: what keras_dist does with it.
        without: what happens if the framework drops it.
        parameters: the first parameters of the function, after `self`, as keras_dist passes or
            receives them; further ones must be optional. Defaults to `None`: not checked.
        instance: whether it is set on instances, by functions of the class or the module.
            Defaults to `False`.
        applies: returns whether the framework at hand is one that has the name. Defaults to
            always.
    """

    owner: Callable[[], Any]
    name: str
    purpose: str
    without: str
    parameters: tuple[str, ...] | None = None
    instance: bool = False
    applies: Callable[[], bool] = lambda: True

    def fault(self) -> str | None:
        """Returns what is wrong with the name, as a phrase; `None` if it is as expected."""
        try:
            owner = self.owner()
        except (AttributeError, ImportError) as error:
            return f"none ({error})"
        if self.instance:
            return None if _mentions(owner, self.name) else f"none in {_path(owner)}"
        found = getattr(owner, self.name, None)
        if found is None:
            return f"none in {_path(owner)}"
        if self.parameters is None:
            return None
        return _difference(found, self.parameters, inspect.isclass(owner))


@functools.cache
def check(framework: str) -> None:
    """Checks that a framework has the names that keras_dist relies on, once per process.

    Args:
        framework: the name of a module of this package; it is imported, and the framework by it.

    Raises:
        BackendError: a name is missing, or its function takes other parameters.
    """
    module = importlib.import_module(f"keras_dist._compat.{framework}")
    for entry, fault in missing(module.CONTRACT):
        raise errors.BackendError(explain_missing(module.version(), entry, fault))


def missing(names: Iterable[Name]) -> list[tuple[Name, str]]:
    """Returns the names that are not as expected, each with what is wrong."""
    found = [(entry, entry.fault()) for entry in names if entry.applies()]
    return [(entry, fault) for entry, fault in found if fault is not None]


def explain_missing(framework: str, entry: Name, fault: str) -> str:
    """Returns the text of the error about a name.

    Args:
        framework: its name and version.
        entry: the name.
        fault: what is wrong with it.
    """
    called = "" if entry.parameters is None else f"({', '.join(entry.parameters)})"
    return errors.explain(
        f"[keras_dist {__version__} with {framework}]",
        f"the name {entry.name}{called}, which keras_dist uses {entry.purpose}",
        f"{fault}; without it {entry.without}",
        "Install a version of the framework that this version of keras_dist supports, see its "
        "README, or a newer version of keras_dist.",
    )


def _mentions(owner: Any, name: str) -> bool:
    """Tells whether the code of a module, or of a class and its bases, uses an attribute."""
    for base in owner.__mro__ if inspect.isclass(owner) else [owner]:
        for member in vars(base).values():
            code = getattr(_function(member), "__code__", None)
            if code is not None and name in code.co_names:
                return True
    return False


def _function(member: Any) -> Any:
    """Returns the function in a method, property or decorated function."""
    if isinstance(member, property):
        member = member.fget
    return inspect.unwrap(getattr(member, "__func__", member))


def _difference(function: Any, expected: tuple[str, ...], is_method: bool) -> str | None:
    """Returns how the parameters of a function differ from what is expected, as a phrase."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:
        return None  # a function in C, whose parameters are not known
    if is_method and not inspect.ismethod(function):
        parameters = parameters[1:]
    named = [one for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
    further = [one for one in named[len(expected) :] if one.default is one.empty]
    if tuple(one.name for one in named[: len(expected)]) == expected and not further:
        return None
    return f"{function.__name__}({', '.join(map(str, parameters))})"


def _path(owner: Any) -> str:
    name = owner.__name__
    return name if inspect.ismodule(owner) else f"{owner.__module__}.{name}"
