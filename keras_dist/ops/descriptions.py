"""Docstrings of the framework packages, composed from those of the operations.

Each operation is described once, by the docstring of its function. The functions of the same name
for tensors of TensorFlow, torch and JAX inherit that text and add only what differs.
"""

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

# Arguments of Horovod's functions.
IGNORED = (
    "compression device device_dense device_sparse ignore_name_scope inplace session use_locking"
).split()
DEPRECATED = {"average": "as in `allreduce`."}
SECTIONS = re.compile(r"^(Args|Returns|Raises|Example):\n", re.MULTILINE)
ENTRY = re.compile(r"^    (?=\w)", re.MULTILINE)


def described_by(operation: Callable[..., Any]) -> Callable[[F], F]:
    """Decorates a function whose docstring holds what differs from that of an operation."""

    def describe(function: F) -> F:
        if operation.__doc__:  # `python -OO` strips docstrings
            names = list(inspect.signature(function).parameters)
            package = function.__module__.split(".")[1]
            function.__doc__ = compose(operation.__doc__, function.__doc__ or "", names, package)
        return function

    return describe


def compose(inherited: str, own: str, parameters: Sequence[str], package: str) -> str:
    """Returns the docstring of a function of a framework package."""
    base, added = _parse(inherited), _parse(own)
    arguments = _entries(base.get("Args", ""))
    renamed = (next(iter(arguments), ""), next(iter(parameters), ""))
    base = {name: _translate(text, package, *renamed) for name, text in base.items()}
    inherited_arguments = _entries(base.get("Args", ""))
    if renamed[0]:
        inherited_arguments.setdefault(renamed[1], inherited_arguments[renamed[0]])
    found = dict.fromkeys(IGNORED, "accepted for scripts of Horovod; has no effect.")
    found |= DEPRECATED | inherited_arguments | _entries(added.get("Args", ""))
    raised = _entries(base.get("Raises", "")) | _entries(added.get("Raises", ""))
    sections = {
        "Args": _listed({name: found[name] for name in parameters if name in found}),
        "Returns": added.get("Returns") or base.get("Returns", ""),
        "Raises": _listed(raised),
        "Example": added.get("Example", ""),
    }
    blocks = [base[""], added[""], *(f"{name}:\n{text}" for name, text in sections.items() if text)]
    return "\n\n".join(block for block in blocks if block) + "\n"


def queued_docstring(operation: str) -> str:
    """Returns the docstring of the queued form of an operation."""
    return f"""Queues `{operation}` and returns a handle without blocking.

Collective: every rank, in the same order or with a `name`.

The arguments are those of `{operation}`. Arrays and lists among them must not be changed until the
operation has completed. Calls on a `process_set` are ordered among themselves.

Returns:
    `Handle`; `synchronize` returns what `{operation}` returns, or raises its error.
"""


def _parse(docstring: str) -> dict[str, str]:
    """Returns the text of each section by its name; paragraphs before them have the name ``""``."""
    head, *rest = SECTIONS.split(inspect.cleandoc(docstring))
    bodies = (body.rstrip() for body in rest[1::2])
    return {"": head.rstrip(), **dict(zip(rest[::2], bodies, strict=True))}


def _entries(section: str) -> dict[str, str]:
    """Returns the text of each entry of a section by its name."""
    pairs = (entry.rstrip().partition(": ") for entry in ENTRY.split(section) if entry.strip())
    return {name: text for name, _, text in pairs}


def _listed(entries: dict[str, str]) -> str:
    return "\n".join(f"    {name}: {text}" for name, text in entries.items())


def _translate(text: str, package: str, value: str, tensor: str) -> str:
    """Returns a text about arrays as one about the tensors of a framework."""
    if value:
        text = text.replace(f"`{value}`", f"`{tensor}`")
    if package == "jax":
        return text
    return re.sub(r"\barray", "tensor", re.sub(r"\b([Aa])n array", r"\1 tensor", text))
