"""The package as installed: version, contents of wheel and sdist, the README's example."""

import importlib.metadata
import os
import re
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import start_jobs
import yaml
from packaging.requirements import Requirement

from keras_dist._version import __version__

ROOT = Path(__file__).parents[2]


def run(*command, **options):
    """Runs a command and returns its output; fails with the output if the command fails."""
    ended = start_jobs.run(command, **options)
    assert ended.returncode == 0, f"{' '.join(map(str, command))}\n{ended.stdout}"
    return ended.stdout


# --- Version


def test_version_stands_in_one_place():
    files = [*ROOT.glob("keras_dist/**/*.py"), ROOT / "setup.cfg", ROOT / "pyproject.toml"]
    holders = [path.name for path in files if f'"{__version__}"' in path.read_text()]
    assert holders == ["_version.py"]


def test_installed_version_is_the_source_version():
    assert importlib.metadata.version("keras_dist") == __version__


def test_what_is_cited_is_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == __version__
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert f"## [{__version__}] - {citation['date-released']}\n" in changes
    required = {"authors", "cff-version", "message", "title"}
    assert required <= set(citation)


# --- Wheel and sdist


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """The wheel and the sdist of this source tree."""
    directory = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", directory, ROOT)
    [wheel], [sdist] = directory.glob("*.whl"), directory.glob("*.tar.gz")
    return wheel, sdist


@pytest.mark.slow
def test_wheel_holds_the_package_and_nothing_else(distributions):
    wheel, _ = distributions
    assert wheel.name == f"keras_dist-{__version__}-py3-none-any.whl"
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = {
        str(path.relative_to(ROOT))
        for path in ROOT.glob("keras_dist/**/*.py*")
        if path.suffix in (".py", ".pyi")
    }
    assert {name for name in names if ".dist-info/" not in name} == sources | {
        "keras_dist/py.typed",
        "keras_dist/launch/cli/timeline.html",
        "keras_dist/monitor/page.html",
    }
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_sdist_holds_what_the_tests_need(distributions):
    _, sdist = distributions
    root = f"keras_dist-{__version__}/"
    with tarfile.open(sdist) as archive:
        names = {name.removeprefix(root) for name in archive.getnames()}
    needed = "LICENSE README.md constraints.txt scripts/test tests/ranks/conftest.py"
    benchmarks = {f"benchmarks/{path.name}" for path in ROOT.glob("benchmarks/*.py")}
    assert set(needed.split()) | benchmarks <= names
    assert not [name for name in names if "__pycache__" in name]


# --- README


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["tensorflow", "jax", "torch"])
def test_first_example_runs_from_the_wheel(distributions, tmp_path, backend):
    """In an environment with what the wheel requires and nothing else."""
    wheel, _ = distributions
    readme = (ROOT / "README.md").read_text()
    code = re.search(r"^```python\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)[1]
    (tmp_path / "train.py").write_text(code)
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv")
    bin = tmp_path / "venv" / "bin"
    hidden = ("PYTHONPATH", "LEFT_OUT")  # of these tests
    environment = {name: text for name, text in os.environ.items() if name not in hidden}
    environment |= {"KERAS_BACKEND": backend, "PATH": f"{bin}{os.pathsep}{os.environ['PATH']}"}
    start = {"cwd": tmp_path, "env": environment}
    pip = (sys.executable, "-m", "pip", "--python", bin / "python", "install", "-q", "--no-deps")
    run(*pip, wheel, **start)
    [site] = (tmp_path / "venv").glob("lib/python*/site-packages")
    [installed] = importlib.metadata.distributions(path=[str(site)])
    extra = "tensorflow-cpu" if backend == "tensorflow" else backend
    for name in needed(installed, {extra, "mpich"}):
        link(name, tmp_path / "venv")

    on_two_ranks = run(bin / "keras-dist", "run", "-np", "2", "python", "train.py", **start)
    check_training(on_two_ranks, code)
    check_training(run(bin / "python", "train.py", **start), code)


def needed(distribution, extras):
    """Returns the names of all distributions that one requires with some extras."""
    found = {}

    def add(distribution, extras):
        for text in distribution.requires or ():
            one = Requirement(text)
            cases = [{"extra": extra} for extra in ("", *extras)]
            if one.marker is not None and not any(map(one.marker.evaluate, cases)):
                continue
            if one.name not in found or not one.extras <= found[one.name]:
                found[one.name] = found.get(one.name, set()) | one.extras
                add(importlib.metadata.distribution(one.name), one.extras)

    add(distribution, extras)
    return found


def link(name, folder):
    """Links what a distribution of this environment installs into another one."""
    for file in importlib.metadata.distribution(name).files:
        parts = Path(os.path.relpath(file.locate(), sys.prefix)).parts
        # Of a package its folder. Several have files in bin and lib.
        parts = parts[:4] if "site-packages" in parts else parts
        target = folder.joinpath(*parts)
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(Path(sys.prefix, *parts))


def check_training(printed, code):
    """Checks that every epoch is announced by one rank, and that the loss falls."""
    epochs = int(re.search(r"epochs=(\d+)", code)[1])
    announced = re.findall(r"Epoch (\d+)/", printed)
    assert announced == [str(epoch + 1) for epoch in range(epochs)], printed
    losses = [float(loss) for loss in re.findall(r"loss: ([\d.]+)", printed)]
    assert losses[-1] < losses[0], printed
