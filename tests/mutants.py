"""Mutation testing: makes small changes to modules, and reports those that no test detects.

Cosmic Ray makes the mutants, in a copy of the repository; `scripts/mutate` installs it. Each is
tested in a fork of a process that has already imported the packages of the tests, which is much
faster than a new process. docs/mutations.md must explain each mutant that survives.

    python tests/mutants.py                      all modules
    python tests/mutants.py buckets partition    modules whose path contains one of these words

The exit status is 1 if there are survivors that the page does not explain.
"""

import argparse
import difflib
import importlib
import itertools
import os
import resource
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "mutations.md"
COPY = ROOT / "build" / "mutants"

# Each module, and the tests that must detect its mutants; none of them needs other ranks.
MODULES = {
    "_engine/buckets.py": "tests/unit/_engine/test_buckets.py",
    "_engine/signature.py": "tests/unit/_engine/test_signature.py",
    "_engine/arithmetic.py": "tests/unit/_engine/test_arithmetic.py",
    "data/partition.py": "tests/unit/data/test_data_partition.py",
    "ops/reduction_options.py": "tests/unit/ops/test_reduction_options.py",
    "callbacks/learning_rate.py": "tests/unit/callbacks/test_learning_rate.py",
}

# The replacements of an operator that imply the others: a test that tells a sum from a difference
# tells it from a bitwise product as well. Unions in annotations are not mutated.
BINARY = {
    "Add": "Sub Mul",
    "Sub": "Add Mul",
    "Mul": "Add Div FloorDiv",
    "Div": "Mul FloorDiv",
    "FloorDiv": "Div Mul Mod",
    "Mod": "Mul FloorDiv",
    "Pow": "Mul",
    "BitAnd": "BitOr",
}
COMPARISONS = {
    "Eq": "NotEq LtE GtE",
    "NotEq": "Eq Lt Gt",
    "Lt": "LtE NotEq GtE",
    "LtE": "Lt Eq Gt",
    "Gt": "GtE NotEq LtE",
    "GtE": "Gt Eq Lt",
    "Is": "IsNot",
    "IsNot": "Is",
}
OTHERS = """
    AddNot ExceptionReplacer NumberReplacer RemoveDecorator ZeroIterationForLoop
    ReplaceAndWithOr ReplaceOrWithAnd ReplaceTrueWithFalse ReplaceFalseWithTrue
    ReplaceBreakWithContinue ReplaceContinueWithBreak
    ReplaceUnaryOperator_Delete_USub ReplaceUnaryOperator_Delete_Not
"""

# Imported before the first fork: nothing that imports a module with mutants.
NEEDED = "numpy ml_dtypes mpi4py hypothesis.strategies keras"
SECONDS = 60  # of processor time: a mutant that takes longer is detected


def main(arguments):
    """Tests the mutants of the chosen modules; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("words", nargs="*", help="parts of paths; all modules without any")
    words = parser.parse_args(arguments).words
    os.nice(10)
    copy_repository()
    for name in NEEDED.split():
        importlib.import_module(name)
    chosen = [one for one in MODULES if not words or any(word in one for word in words)]
    page, unexplained = PAGE.read_text(), 0
    rows = ["| module | mutants | noticed | equivalent |", "|---|---|---|---|"]
    for module in chosen:
        count, survivors = examine(module)
        new = [one for one in survivors if one not in section(page, module)]
        unexplained += len(new)
        print(f"\n{module}: {len(new)} that the page does not explain", *new, sep="\n", flush=True)
        noticed = count - len(survivors)
        rows.append(f"| `{module}` | {count} | {noticed} | {len(survivors) - len(new)} |")
    print("", *rows, sep="\n")
    return 1 if unexplained else 0


def copy_repository():
    """Copies the files that the mutants and their tests need, and changes to the copy."""
    shutil.rmtree(COPY, ignore_errors=True)
    for folder in ("keras_dist", "tests"):
        shutil.copytree(ROOT / folder, COPY / folder)
    shutil.copy(ROOT / "pyproject.toml", COPY)
    os.chdir(COPY)
    sys.path.insert(0, str(COPY))
    # The backend with the fastest import: rates are set on the optimizers of any backend. Plugins
    # that the tests do not use are disabled.
    os.environ.update(KERAS_BACKEND="jax", PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")


def examine(module):
    """Tests the mutants of a module; returns their number, and a row for each that survives."""
    path = COPY / "keras_dist" / module
    if not passes(module):
        sys.exit(f"{MODULES[module]} fails without any mutant.")
    sys.dont_write_bytecode = True  # mutants of the same second would have the same bytecode cache
    original = path.read_text()
    mutants = dict.fromkeys(mutants_of(original))
    survivors = []
    for number, mutant in enumerate(mutants, start=1):
        print(f"\r{module}: {number} of {len(mutants)}", end="", file=sys.stderr, flush=True)
        path.write_text(mutant)
        if passes(module):
            survivors.append(row(original, mutant))
    path.write_text(original)
    sys.dont_write_bytecode = False
    return len(mutants), survivors


def mutants_of(code):
    """Yields all mutants of a module."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    for name in operators():
        operator = get_operator(f"core/{name}")()
        made = (mutate_code(code, operator, number) for number in itertools.count())
        yield from itertools.takewhile(bool, made)


def passes(module):
    """Returns whether the tests of a module pass, in a fork of this process."""
    child = os.fork()
    if not child:
        os._exit(run(MODULES[module]))
    return os.waitpid(child, 0)[1] == 0


def run(tests):
    """Runs tests without output and with a time limit; returns the exit status."""
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    options = "-x -q --tb=no -p no:cacheprovider -p _hypothesis_pytestplugin"
    return pytest.main([*options.split(), "--hypothesis-profile=mutants", tests], [CheapFirst()])


class CheapFirst:
    """Runs tests with generated examples last: the others are faster."""

    def pytest_collection_modifyitems(self, items):
        items.sort(key=lambda item: hasattr(item.obj, "hypothesis"))


def operators():
    """Yields the names of Cosmic Ray's operators."""
    for kind, replacements in (("Binary", BINARY), ("Comparison", COMPARISONS)):
        for old, several in replacements.items():
            yield from (f"Replace{kind}Operator_{old}_{new}" for new in several.split())
    yield from OTHERS.split()


def row(original, mutant):
    """Returns a table row: the lines that a mutant changes, before and after."""
    lines = difflib.ndiff(original.splitlines(), mutant.splitlines())
    changed = [line for line in lines if line[0] in "-+"]
    before, after = ([line[2:] for line in changed if line[0] == sign] for sign in "-+")
    return f"| {code(before)} | {code(after)} |"


def code(lines):
    text = " ".join(" ".join(lines).split())
    return f"`{text}`".replace("|", "\\|") if text else "nothing"


def section(page, module):
    """Returns the section of a module on the page."""
    return page.partition(f"\n## `{module}`\n")[2].partition("\n## ")[0]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
