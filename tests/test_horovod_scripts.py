"""Scripts for Horovod run with their import changed and nothing else."""

from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent / "horovod_scripts"


@pytest.mark.parametrize("framework", ["tensorflow", "torch"])
def test_a_script_runs_with_its_import_changed(run_ranks, tmp_path, framework):
    old = (SCRIPTS / f"{framework}_loop.py").read_text()
    line = f"import horovod.{framework} as hvd\n"
    assert old.count(line) == old.count("import horovod") == 1
    script = tmp_path / "train.py"
    script.write_text(old.replace(line, f"import keras_dist.{framework} as hvd\n"))
    job = run_ranks(2, str(script), str(tmp_path), timeout=300)
    assert job.returncode == 0, job.stdout
    said = "ranks 2, loss fell: True, replicas apart: 0.0"
    assert job.stdout.strip().splitlines()[-1].endswith(said), job.stdout
    assert (tmp_path / "checkpoint").exists() == (framework == "tensorflow")
