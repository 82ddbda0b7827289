"""`scripts/environment` and `scripts/demo`: what is installed when, with a stand-in for uv."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BASH = shutil.which("bash")
FILES = ("constraints.txt", "pyproject.toml", "setup.cfg", "scripts/demo", "scripts/environment")
PYTHON = f"""#!{BASH}
# A Python that creates environments at once.
[ "$2" = venv ] || exec {sys.executable} "$@"
echo created >>log
rm -rf "${{!#}}"
mkdir -p "${{!#}}/bin"
ln -s {sys.executable} "${{!#}}/bin/python"
"""
UV = f"""#!{BASH}
echo "$*" >>log
[ -z "${{UV_FAILS:-}}" ]
"""


@pytest.fixture
def clone(tmp_path):
    """A function that runs a command in a copy of the scripts and returns what it installs."""
    for name in FILES:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, path)
    for name, text in (("python", PYTHON), ("uv", UV)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    log = tmp_path / "log"

    def run(command, status=0, **variables):
        log.write_text("")
        search = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
        ended = subprocess.run(
            [BASH, "-euc", f"source scripts/environment; {command}"],
            cwd=tmp_path,
            env={**os.environ, "PATH": search, "PYTHON": str(tmp_path / "python"), **variables},
            capture_output=True,
            text=True,
        )
        assert ended.returncode == status, ended
        return log.read_text().splitlines()

    return run


def extras(line):
    return line.rpartition("--editable .")[2]


def test_the_demo_installs_what_it_runs_and_the_tests_complete_it(clone):
    created, demo = clone("demo_environment tensorflow")
    assert created == "created"
    assert extras(demo) == "[tensorflow-cpu,mpich] scikit-learn"
    assert clone("demo_environment tensorflow") == []
    (tests,) = clone("environment")
    assert "test,dev" in extras(tests)
    assert clone("environment; demo_environment tensorflow") == []
    assert [*map(extras, clone("demo_environment jax"))] == ["[jax,mpich] scikit-learn"]


@pytest.mark.slow
def test_an_environment_is_made_again_after_an_interruption_only(clone):
    clone("environment")
    assert clone("install() { kill -9 $$; }; docs_tools", -9) == []
    assert clone("docs_tools")[0] == "created"
    assert len(clone("mutation_tools", status=1, UV_FAILS="1")) == 1
    assert "created" not in clone("mutation_tools")


@pytest.mark.slow
def test_new_requirements_are_installed_in_the_same_environment(clone):
    clone("environment")
    installed = clone("echo '# other' >>constraints.txt; environment")
    assert "test,dev" in extras(installed[-1])


@pytest.mark.parametrize("arguments", ["--backend", "--backend=nothing", "--epochs 2 --backend x"])
def test_the_demo_refuses_a_backend_that_it_does_not_know(clone, arguments):
    assert clone(f"scripts/demo {arguments}", status=2) == []
