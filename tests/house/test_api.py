"""The public interface does not change unnoticed: names, arguments, commands and variables.

tests/golden/api.txt has what the sources say, without importing a framework. After a change that is
meant, this command writes it anew:

    GOLDEN=write .venv/bin/python -m pytest tests/house/test_api.py
"""

import argparse
import ast
import difflib
import importlib
import os

from test_docs import ROOT, names_in, public_names

from keras_dist import config
from keras_dist.launch import cli

GOLDEN = ROOT / "tests" / "golden" / "api.txt"
FACES = "dask jax kubernetes ray spark tensorflow torch".split()  # imported by themselves
INTERNAL = "keras_dist.training.session_callback"  # what steers callbacks is for no script


def test_the_interface_is_that_of_the_golden_file():
    text = "\n".join([*names(), "", *commands(), "", *variables(), ""])
    if os.environ.get("GOLDEN") == "write":
        GOLDEN.write_text(text)
    found = GOLDEN.read_text().splitlines()
    changed = difflib.unified_diff(found, text.splitlines(), str(GOLDEN), "now", lineterm="")
    assert text.splitlines() == found, "\n".join([*changed, __doc__])


def names():
    """Yields a line for each public name, and for each public member of a class."""
    faces = [
        f"keras_dist.{face}.{name}"
        for face in FACES
        for name in names_in(source(f"keras_dist.{face}"))
    ]
    for name in sorted({*public_names(), *faces} - {"keras_dist.__version__"}):
        place, _, own = name.rpartition(".")
        yield from described(name, *definition(place, own))


def definition(module, name):
    """Returns the syntax tree of a name, and the module that has it."""
    path = source(f"{module}.{name}")
    if path is not None:
        return ast.parse(""), f"{module}.{name}"
    path = source(module)
    trees = [
        ast.parse(each.read_text()) for each in (path.with_suffix(".pyi"), path) if each.exists()
    ]
    for node in [node for tree in trees for node in ast.walk(tree)]:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return node, module
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if name in map(ast.unparse, targets):
                return followed(node.value, module)
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if name == (alias.asname or alias.name):
                    origin = absolute(node, module, path.name == "__init__.py")
                    if not origin.startswith("keras_dist"):
                        return ast.Name(f"{origin}.{alias.name}"), module
                    return definition(origin, alias.name)
    raise LookupError(f"{module} does not define {name}")


def followed(value, module):
    """Returns what a value such as `_engine.Handle` is; itself if it is no name of keras_dist."""
    if isinstance(value, ast.Name | ast.Attribute):
        place, _, name = ast.unparse(value).rpartition(".")
        try:
            inner, at = definition(module, place) if place else (ast.parse(""), module)
            if isinstance(inner, ast.Module):
                return definition(at, name)
        except LookupError:
            pass
    return value, module


def source(module):
    """Returns the file of a module; `None` if there is none."""
    path = ROOT.joinpath(*module.split("."))
    found = (path.with_suffix(".py"), path / "__init__.py")
    return next((each for each in found if each.exists()), None)


def absolute(node, module, is_package):
    """Returns the module from which a statement imports."""
    if not node.level:
        return node.module
    parts = module.split(".")
    parts = parts[: len(parts) + is_package - node.level]
    return ".".join([*parts, *([node.module] if node.module else [])])


def described(name, node, module):
    """Yields the lines of a name."""
    if isinstance(node, ast.Module):
        yield f"{name}: module"
    elif isinstance(node, ast.FunctionDef):
        yield name + arguments(node)
    elif isinstance(node, ast.ClassDef):
        members, hidden = {}, set()
        for each, place in lineage(node, module):
            found = dict(of_class(each))
            hidden |= set(found) if place == INTERNAL else set()
            members = found | members
        members = {member: text for member, text in members.items() if member not in hidden}
        # Without a constructor of its own, a class is made as its base outside of keras_dist is.
        yield f"{name}{members.pop('__init__', '')}: class"
        yield from (f"{name}.{member}{members[member]}" for member in sorted(members))
    else:
        yield f"{name} = {ast.unparse(node)}"


def lineage(node, module):
    """Yields a class and its bases that are classes of keras_dist, each with its module."""
    yield node, module
    for base in node.bases:
        try:
            found, place = definition(module, ast.unparse(base))
        except LookupError:  # of a framework
            continue
        if isinstance(found, ast.ClassDef):
            yield from lineage(found, place)


def of_class(node):
    """Yields name and arguments of the members that users call or read; Keras calls hooks."""
    for each in node.body:
        if isinstance(each, ast.FunctionDef) and (each.name[0] != "_" or each.name == "__init__"):
            if each.name.startswith("on_"):
                continue
            is_value = {"property", "functools.cached_property"} & set(
                map(ast.unparse, each.decorator_list)
            )
            yield each.name, "" if is_value else arguments(each)
        elif isinstance(each, ast.Assign | ast.AnnAssign):
            targets = each.targets if isinstance(each, ast.Assign) else [each.target]
            for target in targets:
                if isinstance(target, ast.Name) and target.id[0] != "_":
                    yield target.id, "" if each.value is None else f" = {ast.unparse(each.value)}"


def arguments(node):
    """Returns the arguments of a function without their types, which are no part of calls."""
    given = node.args
    for each in (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg):
        if each is not None:
            each.annotation = None
    return f"({ast.unparse(given)})"


def commands():
    """Yields a line for each command, with its options and positional arguments."""
    for name in cli.COMMANDS:
        made = argparse.ArgumentParser().add_subparsers()
        module = "checkpoint" if name == "export" else name.replace("-", "_")
        importlib.import_module(f"keras_dist.launch.cli.{module}").add_to(made, name)
        actions = [each for each in made.choices[name]._actions if each.help != argparse.SUPPRESS]
        options = sorted("|".join(each.option_strings) or each.dest.upper() for each in actions)
        yield f"keras-dist {name} {' '.join(options)}"


def variables():
    """Yields a line for each environment variable, with its default."""
    yield from (f"{each.name}={each.default}" for each in config.VARIABLES)
