"""A sharded checkpoint is read by other numbers of ranks and on other backends, to the bit."""

import shutil

import pytest
from start_jobs import SCRIPTS, lean, told

import keras_dist

pytestmark = pytest.mark.skipif(keras_dist.size() > 1, reason="starts jobs of its own")


def check(run_ranks, tmp_path, saved, *loaded):
    """Saves and loads, each with a backend and a number of ranks."""
    digests = []
    for backend, ranks in (saved, *loaded):
        env = {**lean(), "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
        left_out = {"jax", "sklearn", "tensorflow"} - {backend}
        env["LEFT_OUT"] = " ".join(left_out)
        how, folder = "save", tmp_path / "saved"
        if digests:
            how, folder = "load", tmp_path / f"{backend}-{ranks}"
            shutil.copytree(tmp_path / "saved", folder)  # which goes on in it
        ended = run_ranks(ranks, SCRIPTS / "saved_sharded.py", folder, how, env=env)
        digests.append(told(ended, r"bits (\w+)")[1])
        digests = digests[:1] if digests[-1] == digests[0] else digests
        assert len(digests) == 1, f"{backend} on {ranks} ranks has read other bits"


@pytest.mark.slow
def test_four_ranks_save_and_three_and_one_load_on_other_backends(run_ranks, tmp_path):
    check(run_ranks, tmp_path, ("jax", 4), ("torch", 3), ("tensorflow", 1))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["tensorflow", "jax", "torch"])
def test_each_backend_saves_for_all(backend, run_ranks, tmp_path):
    check(run_ranks, tmp_path, (backend, 2), ("tensorflow", 1), ("jax", 3), ("torch", 1))
