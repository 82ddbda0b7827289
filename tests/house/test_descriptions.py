"""Docstrings of the framework packages inherit those of the operations."""

import importlib
import inspect
import sys

import pytest
from start_jobs import lean, run

from keras_dist import ops
from keras_dist.ops.descriptions import compose

OPERATION = """Moves an array.

Collective: every rank.

Args:
    value: array of rows; `value` stays
        as it is.
    name: operation name.

Returns:
    New array like `value`.

Raises:
    ArgumentError: `value` is no array.

Example:
```python
move(1)
```
"""


def test_everything_but_the_example_is_inherited():
    assert compose(OPERATION, "", ["tensor", "name", "session"], "torch") == (
        "Moves a tensor.\n\n"
        "Collective: every rank.\n\n"
        "Args:\n"
        "    tensor: tensor of rows; `tensor` stays\n"
        "        as it is.\n"
        "    name: operation name.\n"
        "    session: accepted for scripts of Horovod; has no effect.\n\n"
        "Returns:\n    New tensor like `tensor`.\n\n"
        "Raises:\n    ArgumentError: `tensor` is no tensor.\n"
    )


def test_own_paragraphs_are_added_and_own_entries_replace_inherited_entries():
    own = """Has a gradient.

    Args:
        array: rows.

    Raises:
        KeyError: no.

    Example:
    ```python
    mine(1)
    ```
    """
    text = compose(OPERATION, own, ["name", "array"], "jax")
    assert "every rank.\n\nHas a gradient.\n\nArgs:\n    name: operation name.\n" in text
    assert "    array: rows.\n\nReturns" in text
    assert text.endswith("    KeyError: no.\n\nExample:\n```python\nmine(1)\n```\n")


FACE = """
import importlib, inspect
face = importlib.import_module("keras_dist.{face}")
for name in face.__all__:
    function = getattr(face, name)
    if not inspect.isfunction(function) or not function.__module__.startswith(face.__name__):
        continue
    text = inspect.getdoc(function)
    print(name, text.count("Args:"), text.count("Returns:"))
    if not name.endswith(("_async", "_async_")):
        for parameter in inspect.signature(function).parameters:
            assert f"    {{parameter}}: " in text, (name, parameter)
"""


@pytest.mark.parametrize("face", ["tensorflow", "torch", "jax"])
def test_every_argument_of_a_framework_package_is_described(face):
    if not importlib.util.find_spec(face):
        pytest.skip(f"{face} is not installed")
    ended = run([sys.executable, "-c", FACE.format(face=face)], env=lean(KERAS_BACKEND=face))
    assert ended.returncode == 0, ended.stdout
    assert "allreduce 1 1" in ended.stdout.splitlines()


def test_every_argument_of_an_operation_is_described():
    for name in ops.__all__:
        function = getattr(ops, name)
        for parameter in inspect.signature(function).parameters:
            assert f"    {parameter}: " in inspect.getdoc(function), (name, parameter)
