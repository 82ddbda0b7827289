"""The contract with a framework: the private names that keras_dist uses, and their checks.

A framework may rename what it does not document. A method that is overridden under its old name is
never called, and training would continue without the reduction. `check` finds it before the first
step. Names that only some scripts need are checked where they are first used, by `require`.
"""

import dataclasses
import functools
import importlib
import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any

from keras_dist import errors
from keras_dist._version import __version__


@dataclasses.dataclass(frozen=True, eq=False)
class Name:
    """A private name of a framework."""

    # The module, or class of a module, that has the name: `"module"` or
    # `"module:attribute.attribute"`, imported where it is checked; or a function that returns it.
    owner: str | Callable[[], Any]
    name: str
    purpose: str
    without: str
    parameters: tuple[str, ...] | None = None
    instance: bool = False
    on_use: bool = False
    applies: Callable[[], bool] = lambda: True

    def resolve(self) -> Any:
        """Returns the owner."""
        if not isinstance(self.owner, str):
            return self.owner()
        module, _, path = self.owner.partition(":")
        names = path.split(".") if path else []
        return functools.reduce(getattr, names, importlib.import_module(module))

    def fault(self) -> str | None:
        """Returns the difference from what is expected, as a phrase; `None` if there is none."""
        try:
            owner = self.resolve()
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


@dataclasses.dataclass(frozen=True)
class Owner:
    """A module, or a class of a module, that has private names; see `Name.owner`."""

    path: str | Callable[[], Any]

    def name(self, name: str, purpose: str, without: str, **options: Any) -> Name:
        """Returns a name that it has, whatever it stands for."""
        return Name(self.path, name, purpose, without, **options)

    def method(self, signature: str, purpose: str, without: str, **options: Any) -> Name:
        """Returns a function, or a class, with its parameters, as in `"apply(grads)"`."""
        name, *parameters = re.findall(r"\w+", signature)
        return self.name(name, purpose, without, parameters=tuple(parameters), **options)

    def attribute(self, name: str, purpose: str, without: str, **options: Any) -> Name:
        """Returns an attribute of its instances, which its code mentions."""
        return self.name(name, purpose, without, instance=True, **options)


@functools.cache
def check(module: str) -> None:
    """Checks that a framework has the names of a module of this package, once per process."""
    compat = importlib.import_module(f"keras_dist._compat.{module}")
    _raise_if_missing((entry for entry in compat.CONTRACT if not entry.on_use), compat.version)


@functools.cache
def require(entry: Name, version: Callable[[], str]) -> Any:
    """Returns the owner of a name, after a check that it has the name, once per process."""
    _raise_if_missing([entry], version)
    return entry.resolve()


@functools.cache
def has(*names: Name) -> bool:
    """Returns whether a framework has names that keras_dist can do without."""
    return not missing(names)


def missing(names: Iterable[Name]) -> list[tuple[Name, str]]:
    """Returns the names that are not as expected, each with the difference."""
    found = [(entry, entry.fault()) for entry in names if entry.applies()]
    return [(entry, fault) for entry, fault in found if fault is not None]


def explain_missing(framework: str, entry: Name, fault: str) -> str:
    """Returns the message of the error about a name."""
    called = "" if entry.parameters is None else f"({', '.join(entry.parameters)})"
    return errors.explain(
        f"[keras_dist {__version__} with {framework}]",
        f"the name {entry.name}{called}, which keras_dist uses {entry.purpose}",
        f"{fault}; without it {entry.without}",
        "Install a version of the framework that this version of keras_dist supports, see its "
        "README, or a newer version of keras_dist.",
    )


def _raise_if_missing(names: Iterable[Name], version: Callable[[], str]) -> None:
    for entry, fault in missing(names):
        raise errors.BackendError(explain_missing(version(), entry, fault))


def _mentions(owner: Any, name: str) -> bool:
    """Returns whether the code of a module, or of a class and its bases, uses an attribute."""
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
    """Returns the signature of a function if it has other parameters than expected."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:
        return None  # a function in C, whose signature is unknown
    if is_method and not inspect.ismethod(function):
        parameters = parameters[1:]
    named = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    further = [p for p in named[len(expected) :] if p.default is p.empty]
    if tuple(p.name for p in named[: len(expected)]) == expected and not further:
        return None
    return f"{function.__name__}({', '.join(map(str, parameters))})"


def _path(owner: Any) -> str:
    name = owner.__name__
    return name if inspect.ismodule(owner) else f"{owner.__module__}.{name}"
