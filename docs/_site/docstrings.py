"""Shows docstrings as they are meant; griffe reads sources and runs none of them."""

import re

import griffe

from keras_dist.ops import descriptions

LABELS = re.compile(r"^(Collective|Example|Reference):", re.MULTILINE)
BOLD = r"**\1:**"
TABLE = re.compile(r"^=+ +=+\n.*^=+ +=+$", re.MULTILINE | re.DOTALL)
AS_IT_IS = r"```text\n\g<0>\n```"


class Docstrings(griffe.Extension):
    """Composes inherited docstrings, resolves assigned names and formats labels."""

    def on_package(self, *, pkg, **_):
        """Prepares the docstrings of a package."""
        for room in [found for found in _objects(pkg) if found.is_module]:
            for name, member in list(room.members.items()):
                if member.is_alias or not member.is_attribute:
                    continue
                if str(member.value).startswith("_engine."):
                    target = _object(room, member.value)
                    room.set_member(name, griffe.Alias(name, target, parent=room))
                elif str(member.value).startswith("queued("):
                    room.set_member(name, _queued(room, member))
        for function in list(_objects(pkg)):
            if function.is_function:
                _compose(function)
        for shown in _objects(pkg):
            if shown.docstring:
                text = TABLE.sub(AS_IT_IS, shown.docstring.value)
                shown.docstring.value = LABELS.sub(BOLD, text)


def _objects(root):
    yield root
    for member in root.members.values():
        if not member.is_alias:
            yield from _objects(member)


def _object(room, name):
    found = room.modules_collection[name.canonical_path]
    return found.final_target if found.is_alias else found


def _compose(function):
    """Replaces the docstring of a function under `face` or `described_by` by the composed one."""
    found = [one.value for one in function.decorators if _is_description(one.value)]
    if not found:
        return
    operation = _object(function.parent, found[0].arguments[0])
    _compose(operation)
    package = function.canonical_path.split(".")[1]
    names = [parameter.name for parameter in function.parameters]
    own = function.docstring.value if function.docstring else ""
    text = descriptions.compose(operation.docstring.value, own, names, package)
    function.docstring = griffe.Docstring(text, parent=function)
    function.decorators = [one for one in function.decorators if one.value is not found[0]]


def _is_description(decorator):
    return str(decorator).startswith(("described_by(", "face("))


def _queued(room, member):
    first, *others = member.value.arguments
    operation = _object(room, first)
    fixed = {one.name for one in others if isinstance(one, griffe.ExprKeyword)}
    made = griffe.Function(
        member.name,
        parameters=griffe.Parameters(*(p for p in operation.parameters if p.name not in fixed)),
        returns=griffe.ExprName("Handle", parent=room),
        parent=room,
    )
    text = descriptions.queued_docstring(operation.name)
    made.docstring = griffe.Docstring(text, parent=made)
    return made
