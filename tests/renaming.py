"""Renames private names of frameworks, as another version may do."""

import inspect
import types


def rename(monkeypatch, owner, name):
    """Renames a name of a module or class, and its uses in the class."""
    holders = list(owner.__mro__) if inspect.isclass(owner) else [owner]
    for holder in holders:
        for member in list(vars(holder).values()):
            rename_in(monkeypatch, member, name)
    for holder in holders:
        if name in vars(holder):
            found = vars(holder)[name]
            monkeypatch.delattr(holder, name)
            monkeypatch.setattr(holder, other(name), found, raising=False)


def rename_in(monkeypatch, member, name):
    if isinstance(member, property):
        member = member.fget
    function = inspect.unwrap(getattr(member, "__func__", member))
    code = getattr(function, "__code__", None)
    if code is not None and name in all_names(code):
        monkeypatch.setattr(function, "__code__", renamed(code, name))


def all_names(code):
    inner = [one for one in code.co_consts if isinstance(one, types.CodeType)]
    return {*code.co_names, *(name for one in inner for name in all_names(one))}


def renamed(code, name):
    return code.replace(
        co_names=tuple(other(one) if one == name else one for one in code.co_names),
        co_consts=tuple(
            renamed(one, name) if isinstance(one, types.CodeType) else one for one in code.co_consts
        ),
    )


def other(name):
    return f"{name}_in_the_next_version"
