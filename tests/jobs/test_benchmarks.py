"""The benchmarks run and print their results; speed depends on the machine and is not tested."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from namespaces import hosts_or_skip
from start_jobs import lean, run, told

FOLDER = Path(__file__).parents[2] / "benchmarks"
COMMANDS = [path for path in sorted(FOLDER.glob("*.py")) if "def main():" in path.read_text()]


@pytest.fixture(params=COMMANDS, ids=lambda path: path.stem)
def called(request, monkeypatch):
    """A function that runs a benchmark with options and the smallest workload."""

    def call(*options):
        monkeypatch.syspath_prepend(FOLDER)
        monkeypatch.setattr(sys, "argv", [request.param.name, *map(str, options)])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(request.param), run_name="__main__")
        return ended.value.code

    return call


def test_each_says_what_it_takes_and_refuses_a_folder_that_cannot_be_made(called, tmp_path, capsys):
    assert called("--help") == 0
    assert "--output" in capsys.readouterr().out
    (tmp_path / "file").touch()
    assert called("--output", tmp_path / "file" / "results") == 2  # before anything is measured
    assert "argument --output: no results can be written to" in capsys.readouterr().err


def measured(script, *options):
    """Runs a benchmark as a command, without frameworks that it does not need."""
    return run([sys.executable, FOLDER / script, *options], env=lean(KERAS_BACKEND="torch"))


@pytest.mark.parametrize(
    ("script", "options", "rows"),
    [
        ("allreduce.py", "--ranks 2 --sizes 4096 65536", ["4 KiB", "64 KiB"]),
        pytest.param(
            "hosts.py", "--hosts 2 --ranks 1 --sizes 4096", ["4 KiB"], marks=pytest.mark.slow
        ),
    ],
    ids=["allreduce", "hosts"],
)
def test_results_are_a_table_that_is_written(tmp_path, script, options, rows):
    if script == "hosts.py":
        with hosts_or_skip(2):
            pass  # the benchmark makes its own
    folder = tmp_path / "made" / "by it"
    job = measured(script, "--quick", *options.split(), "--output", folder)
    for row in rows:
        assert re.search(rf"^\| {row}( +\| +\d+\.\d{{3}})+ +\|$", job.stdout, re.M), job.stdout
    last = told(job, rf"passed \d of {len(rows)}")[0]  # a bound for each size
    (written,) = folder.glob("*.md")
    assert written.read_text().strip().endswith(last)


# What they count is exact, so these bounds hold on every machine.


def test_scale(tmp_path):
    python = "/usr/bin/python3"
    check = subprocess.run([python, "-c", "import simgrid"], capture_output=True, text=True)
    if check.returncode:
        pytest.skip("NOT TESTED: simulation of networks: apt-get install python3-simgrid")
    job = measured("scale.py", "--quick", "--output", tmp_path)
    assert told(job, r"passed \d of \d")[0] == "passed 1 of 1", job.stdout
    assert (tmp_path / "scale.md").exists()


def test_a_python_without_the_simulator_is_refused(tmp_path):
    job = measured("scale.py", "--simulator", "false", "--output", tmp_path)
    assert job.returncode == 2
    assert "false cannot import simgrid; install it" in job.stdout


def test_the_picture_is_drawn(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(FOLDER)
    import picture

    jobs = {ranks: [{"rate": 9.0 + ranks, "losses": [2.0, 1.0]}] for ranks in (0, 2, 4)}
    picture.draw({"torch": jobs}, 2, tmp_path)
    for name in ("light", "dark"):
        drawn = (tmp_path / f"picture-{name}.svg").read_text()
        assert all(f">{text}<" in drawn for text in ("torch", "one process", "2 ranks", "4 ranks"))


@pytest.mark.slow
def test_messages(tmp_path):
    job = measured("messages.py", "--ranks", 2, "--output", tmp_path)
    assert told(job, r"passed \d of \d")[0] == "passed 3 of 3", job.stdout


@pytest.mark.slow
def test_the_proof_on_gpus_runs_small_without_one(tmp_path):
    parts = ["torch loop", "one rank, jax", "values", "no memory on one rank", "a rank is killed"]
    output = tmp_path / "table.md"
    job = run(
        [FOLDER.parent / "scripts" / "gpu-proof", "--output", output, "--only", *parts],
        env=lean("jax", KERAS_BACKEND="torch", PYTHON=sys.executable),
    )
    assert job.returncode == 0, job.stdout
    for part in parts:
        assert f"=== {part} " in job.stdout
    assert "replicas after the torch loop" in output.read_text()
