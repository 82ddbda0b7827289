"""The benchmarks run and print their results; speed depends on the machine and is not tested."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from namespaces import hosts_or_skip
from start_jobs import told

FOLDER = Path(__file__).parents[2] / "benchmarks"
COMMANDS = [path for path in sorted(FOLDER.glob("*.py")) if "def main():" in path.read_text()]


@pytest.fixture(params=COMMANDS, ids=lambda path: path.stem)
def run(request, monkeypatch):
    """A function that runs a benchmark with options and the smallest workload."""

    def call(*options):
        monkeypatch.syspath_prepend(FOLDER)
        monkeypatch.setattr(sys, "argv", [request.param.name, *map(str, options)])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(request.param), run_name="__main__")
        return ended.value.code

    return call


def test_each_says_what_it_takes(run, capsys):
    assert run("--help") == 0
    assert "--output" in capsys.readouterr().out


def test_a_folder_that_cannot_be_made_is_refused_before_anything_is_measured(run, tmp_path, capsys):
    (tmp_path / "file").touch()
    assert run("--output", tmp_path / "file" / "results") == 2
    assert "argument --output: no results can be written to" in capsys.readouterr().err


def test_allreduce(tmp_path):
    folder = tmp_path / "made" / "by it"
    options = ["--quick", "--ranks", "2", "--sizes", "4096", "65536", "--output", str(folder)]
    job = subprocess.run(
        [sys.executable, str(FOLDER / "allreduce.py"), *options],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    number = r" +\d+\.\d{3} \|"
    for size in ("4 KiB", "64 KiB"):
        assert re.search(rf"^\| {size} +\|{number * 5}$", job.stdout, re.MULTILINE), job.stdout
    last = told(job, r"passed \d of 2")[0]
    (written,) = folder.glob("*.md")
    assert written.read_text().strip().endswith(last)


def test_scale(tmp_path):
    python = "/usr/bin/python3"
    check = subprocess.run([python, "-c", "import simgrid"], capture_output=True, text=True)
    if check.returncode:
        pytest.skip("NOT TESTED: simulation of networks: apt-get install python3-simgrid")
    job = subprocess.run(
        [sys.executable, str(FOLDER / "scale.py"), "--quick", "--output", str(tmp_path)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    # The simulation is exact, so the bound holds on every machine.
    assert told(job, r"passed \d of \d")[0] == "passed 1 of 1", job.stdout
    assert (tmp_path / "scale.md").exists()


def test_a_python_without_the_simulator_is_refused(tmp_path):
    job = subprocess.run(
        [sys.executable, str(FOLDER / "scale.py"), "--simulator", "false", "--output", tmp_path],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert job.returncode == 2
    assert "false cannot import simgrid; install it" in job.stderr


@pytest.mark.slow
def test_messages(tmp_path):
    job = subprocess.run(
        [sys.executable, str(FOLDER / "messages.py"), "--ranks", "2", "--output", str(tmp_path)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert told(job, r"passed \d of \d")[0] == "passed 3 of 3", job.stdout


@pytest.mark.slow
def test_hosts(tmp_path):
    with hosts_or_skip(2):
        pass  # the benchmark makes its own
    options = ["--quick", "--hosts", "2", "--ranks", "1", "--sizes", "4096", "--output"]
    job = subprocess.run(
        [sys.executable, str(FOLDER / "hosts.py"), *options, str(tmp_path)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert re.search(r"^\| 4 KiB +\|( +\d+\.\d{3} \|)+$", job.stdout, re.MULTILINE), job.stdout
    last = told(job, r"passed \d of 1")[0]
    (written,) = tmp_path.glob("*.md")
    assert written.read_text().strip().endswith(last)


@pytest.mark.slow
def test_fit_hosts(tmp_path):
    with hosts_or_skip(2):
        pass  # the benchmark makes its own
    options = ["--quick", "--models", "cnn", "--backends", "torch", "--gbit", "0", "--output"]
    job = subprocess.run(
        [sys.executable, str(FOLDER / "fit_hosts.py"), *options, str(tmp_path)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert re.search(r"^\| torch +\|( +\d+ \(\d\.\d\d\) \|)+", job.stdout, re.MULTILINE), job.stdout
    last = told(job, r"passed \d of 3")[0]
    (written,) = tmp_path.glob("*.md")
    assert written.read_text().strip().endswith(last)


@pytest.mark.slow
def test_the_proof_on_gpus_runs_small_without_one(tmp_path):
    parts = ["versions", "torch loop", "one rank, jax", "values", "calls of NCCL"]
    parts += ["no memory on one rank", "a rank is killed"]
    output = tmp_path / "table.md"
    job = subprocess.run(
        [FOLDER.parent / "scripts" / "gpu-proof", "--output", output, "--only", *parts],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHON": sys.executable},
        timeout=600,
    )
    assert job.returncode == 0, job.stdout
    for part in parts:
        assert f"=== {part} " in job.stdout
    assert "replicas after the torch loop" in output.read_text()
