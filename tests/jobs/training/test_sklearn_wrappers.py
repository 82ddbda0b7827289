"""Keras' wrappers for scikit-learn, and scikit-learn's copies of them, train distributed."""

import pytest
import start_jobs


@pytest.mark.slow
def test_wrappers_and_their_copies_train_on_all_ranks(run_ranks, tmp_path):
    pytest.importorskip("sklearn")
    env = {**start_jobs.lean("sklearn", KERAS_BACKEND="torch"), "TMPDIR": str(tmp_path)}
    ended = run_ranks(2, start_jobs.SCRIPTS / "sklearn_search.py", env=env)
    assert ended.returncode == 0, ended.stdout
    assert [ended.stdout.count(f"rank {rank} is right") for rank in range(2)] == [1, 1]
