"""Horovod scripts run after one changed import."""

from pathlib import Path

import pytest
from start_jobs import lean, told

SCRIPTS = Path(__file__).parent / "horovod_scripts"


@pytest.mark.parametrize(
    ("name", "old_module", "module"),
    [
        ("tensorflow_loop", "horovod.tensorflow", "keras_dist.tensorflow"),
        ("torch_loop", "horovod.torch", "keras_dist.torch"),
        ("keras_fit", "horovod.tensorflow.keras", "keras_dist"),
    ],
)
def test_a_script_runs_with_its_import_changed(run_ranks, tmp_path, name, old_module, module):
    old = (SCRIPTS / f"{name}.py").read_text()
    line = f"import {old_module} as hvd\n"
    assert old.count(line) == old.count("import horovod") == 1
    script = tmp_path / "train.py"
    script.write_text(old.replace(line, f"import {module} as hvd\n"))
    job = run_ranks(2, str(script), str(tmp_path), env=lean())
    told(job, r"ranks 2, loss fell: True, replicas apart: 0\.0")
    written = {"tensorflow_loop": ["checkpoint"], "keras_fit": ["checkpoint.keras"]}
    names = ("checkpoint", "checkpoint.keras")
    assert [one for one in names if (tmp_path / one).exists()] == written.get(name, [])
