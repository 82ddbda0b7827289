"""Loops by hand on each framework: they equal that of one process over the rows of all ranks.

The loops are in `face_tensorflow` (a tape), `face_torch` (an optimizer) and `face_jax` (`pmean`).
"""

import importlib

import keras
import numpy as np
import pytest

import keras_dist
from keras_dist.ops import gradient_plans

BACKEND = keras.backend.backend()
face = importlib.import_module(f"face_{BACKEND}")
hvd = face.hvd

pytestmark = pytest.mark.jobs("tensorflow-1", "tensorflow-2", "jax-2", "torch-4", "double-torch-3")

SIZE, RANK = keras_dist.size(), keras_dist.rank()
STEPS, ROWS = 4, 3
FORMS = {"torch": ("overlapping", "at the end")}.get(BACKEND, face.GRADIENTS)

# The options of the reduction, and how the loop is written.
CASES = {
    "average": ({}, {}),
    "sum": ({"op": hvd.Sum}, {}),
    "rows": ({}, {"is_sparse": True}),
    "a process set": ({"process_set": range(1, SIZE)}, {}),
}
SMALL = {"min_compression_rate": 0.01}
if BACKEND != "jax":
    CASES |= {
        "momentum": ({}, {"kind": "momentum"}),
        "Adam": ({}, {"kind": "adam"}),
        "predivided": ({"gradient_predivide_factor": 2.0}, {}),
        "groups": ({"groups": 2}, {}),
        "one group": ({"num_groups": 1}, {}),
        "compressed": ({"compression": hvd.Compression.fp16}, {}),
        "a custom compression": ({"compression": face.Halved}, {}),
        "powersgd of full rank": ({"compression": hvd.Compression.powersgd(9, **SMALL)}, {}),
        "topk of all elements": ({"compression": hvd.Compression.topk(1.0)}, {}),
        "the sum of rows": ({"op": hvd.Sum}, {"is_sparse": True}),
        "rows as a dense tensor": ({"sparse_as_dense": True}, {"is_sparse": True}),
    }


def data():
    """Returns the weights at the start, and for each step the rows of each rank."""
    rng = np.random.default_rng(0)
    weights = [rng.standard_normal(shape).astype("float32") for shape in ((9, 4), (8, 4), (4, 1))]
    tokens = rng.integers(0, 9, (STEPS, SIZE, ROWS, 2))
    return weights, tokens, np.sin(tokens.sum(-1, keepdims=True)).astype("float32")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:num_groups:DeprecationWarning")
def test_a_loop_equals_that_of_one_process_over_all_rows(name, form, monkeypatch):
    monkeypatch.setattr(gradient_plans, "overlaps", lambda comm: form == "overlapping")
    options, how = CASES[name]
    together, made = list(range(SIZE)), None
    if name == "a process set":
        if SIZE == 1:
            pytest.skip("a set of one rank is all ranks")
        made = hvd.add_process_set(options["process_set"])
        together = made.ranks if made.included() else [RANK]
        is_alone = BACKEND == "jax" and not made.included()  # `pmean` is for members
        options = None if is_alone else {"process_set": made}
    weights, *batches = data()
    mine = [(tokens[RANK], y[RANK]) for tokens, y in zip(*batches, strict=True)]
    found = face.trained(form, weights, mine, options, **how)
    every = [
        tuple(np.concatenate(rows[together]) for rows in pair)
        for pair in zip(*batches, strict=True)
    ]
    rate = 0.1 * SIZE if "sum" in name else 0.1
    wanted = face.trained("alone", weights, every, None, **how, rate=rate)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    bits = keras_dist.allgather_object([one.tobytes() for one in found])
    assert all(bits[rank] == bits[RANK] for rank in together)
    if made:
        hvd.remove_process_set(made)
