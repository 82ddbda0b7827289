"""Sharded state after the death of a rank: training resumes on another number of ranks."""

import pytest
from start_jobs import SCRIPTS, lean


@pytest.mark.slow
def test_a_job_that_is_killed_resumes_sharded_on_another_number_of_ranks(run_ranks, tmp_path):
    script = SCRIPTS / "resharded.py"
    env = lean(KERAS_BACKEND="jax")  # which starts fastest

    def train(ranks, folder, how, then):
        return run_ranks(ranks, script, tmp_path / folder, how, then, env=env)

    last_lines = []
    for folder, how in (("a", "sharded"), ("b", "whole")):
        assert train(2, folder, how, "kill").returncode != 0
        ended = train(3, folder, how, "go")
        assert ended.returncode == 0, ended.stdout
        last_lines.append(next(li for li in ended.stdout.splitlines() if "ended after" in li))
    assert last_lines[0] == last_lines[1]
