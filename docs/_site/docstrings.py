"""Shows the docstrings of the house as they are meant; griffe reads sources and runs none."""

import importlib
import inspect
import re

import griffe

LABELS = re.compile(r"^(Collective|Example|Reference):", re.MULTILINE)
BOLD = r"**\1:**"
TABLE = re.compile(r"^=+ +=+\n.*^=+ +=+$", re.MULTILINE | re.DOTALL)
AS_IT_IS = r"```text\n\g<0>\n```"


class Docstrings(griffe.Extension):
    """Knows the labels of the dialect, and what stands behind names that are assigned."""

    def on_instance(self, *, obj, **_):
        """Sets labels in bold, as griffe does with its own, and leaves tables as they are."""
        if obj.docstring:
            text = TABLE.sub(AS_IT_IS, obj.docstring.value)
            obj.docstring.value = LABELS.sub(BOLD, text)

    def on_package(self, *, pkg, **_):
        """Shows the class that a name is bound to, and the function that was made for a name."""
        for room in pkg.modules.values():
            for name, member in list(room.members.items()):
                if member.is_alias or not member.is_attribute:
                    continue
                if str(member.value).startswith("_engine."):
                    target = room.modules_collection[member.value.canonical_path].final_target
                    room.set_member(name, griffe.Alias(name, target, parent=room))
                elif str(member.value).startswith("_queued("):
                    room.set_member(name, _queued(room, member))


def _queued(room, member):
    [operation] = member.value.arguments
    made = griffe.Function(
        member.name,
        parameters=room.modules_collection[operation.canonical_path].parameters,
        returns=griffe.ExprName("Handle", parent=room),
        parent=room,
    )
    live = getattr(importlib.import_module(room.path), member.name)
    made.docstring = griffe.Docstring(LABELS.sub(BOLD, inspect.getdoc(live)), parent=made)
    return made
