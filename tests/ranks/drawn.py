"""Cases of training that are drawn, and their data."""

import os
import random
from typing import NamedTuple

import keras
import numpy as np
from hypothesis import strategies as st

BACKEND = keras.backend.backend()
SEED = int(os.environ.get("EXACTNESS_SEED", "0"))  # another one draws other cases
STEPS, ROWS, TOKENS, WORDS, CLASSES = 3, 3, 5, 8, 3
SEVERAL, EMBEDDED = {"outputs"}, {"tokens", "unmasked", "outputs"}
SEQUENCES = {"LSTM", *EMBEDDED}
CLIPS = {"clipnorm", "global_clipnorm", "clipvalue"}

OPTIONS = {
    "model": ["dense", "convolution", "LSTM", "tokens", "unmasked", "outputs"],
    "loss": ["mse", "classes", "ignoring", "function"],
    "reduction": ["sum_over_batch_size", "mean", "mean_with_sample_weight", "sum", None],
    "weights": [None, "samples", "classes", "tokens"],
    "rests": [False, True],
    "ends": [False, True],
    "penalty": [None, "l2"],
    "adds": [None, "add_loss", "activity_regularizer"],
    "normalizes": [False, True],
    "optimizer": ["SGD", "momentum", "Adam"],
    "clips": [None, *sorted(CLIPS)],
    "accumulates": [None, 2, 3],
    "scales": [False, True],
    "wraps": [None, "shard_state", "compression"],
    "way": ["fit", "train_on_batch", "loop"],
    # TensorFlow compiles for seconds, so most cases run eagerly; on JAX, eager steps take longest.
    "runs": {
        "tensorflow": [*["eagerly"] * 4, "graph", "XLA"],
        "jax": ["XLA"],
        "torch": ["eagerly"],
    }[BACKEND],
    "after": [None, "evaluate", "predict"],
}

# Values that do not go together.
EXCLUDED = [
    {"model": {"dense", "convolution"}, "loss": {"ignoring"}},
    {"model": {"dense", "convolution"}, "weights": {"tokens"}},
    {"model": SEQUENCES, "weights": {"classes"}},
    {"model": SEQUENCES, "loss": {"function"}},
    {"model": SEQUENCES, "normalizes": {True}},
    # One process must pad, which counts here.
    {"model": {"unmasked"}, "adds": {"add_loss", "activity_regularizer"}},
    {"model": {"unmasked"}, "reduction": {None}},
    {"model": SEVERAL, "loss": {"ignoring"}},
    {"model": SEVERAL, "reduction": {None}},
    {"model": SEVERAL, "weights": {"tokens"}},
    {"loss": {"mse", "function"}, "weights": {"classes"}},
    {"loss": {"function"}, "reduction": {"mean", "mean_with_sample_weight", "sum", None}},
    {"loss": {"function"}, "weights": {"samples"}},
    # Keras itself adds nothing to a loss of each sample.
    {"reduction": {None}, "penalty": {"l2"}},
    {"reduction": {None}, "adds": {"add_loss", "activity_regularizer"}},
    {"reduction": {None}, "way": {"train_on_batch"}},  # returns the loss of each rank
    {"way": {"loop"}, "model": SEQUENCES},
    {"way": {"loop"}, "loss": {"function"}},
    {"way": {"loop"}, "reduction": {"sum", None}},
    {"way": {"loop"}, "weights": {"classes"}},
    {"way": {"loop"}, "runs": {"graph"}},
    {"way": {"loop"}, "scales": {True}},
    {"way": {"loop"}, "adds": {"add_loss", "activity_regularizer"}},
    {"way": {"loop"}, "after": {"evaluate"}},
    {"way": {"loop", "train_on_batch"}, "ends": {True}},
    {"wraps": {"shard_state"}, "scales": {True}},
    {"wraps": {"shard_state"}, "ends": {True}},
    {"accumulates": {2, 3}, "ends": {True}},
    {"wraps": {"shard_state"}, "clips": {"clipnorm"}},
]
if BACKEND == "tensorflow":
    # In one process these act on each occurrence of a token by itself.
    EXCLUDED += [{"model": EMBEDDED, "clips": CLIPS}]
    EXCLUDED += [{"model": EMBEDDED, "optimizer": {"Adam"}}]
    EXCLUDED += [{"way": {"loop"}, "runs": {"XLA"}}]
    # In a graph, Keras logs the losses of outputs as means over batches, whatever their samples.
    traced = {"model": SEVERAL, "runs": {"graph", "XLA"}}
    EXCLUDED += [{**traced, "rests": {True}}, {**traced, "ends": {True}}]
elif BACKEND == "jax":
    EXCLUDED += [{"reduction": {None}}, {"runs": {"graph"}}]
else:
    EXCLUDED += [{"reduction": {None}}, {"runs": {"graph", "XLA"}}]


class Case(NamedTuple):
    """A way to train, and the data of each step and rank.

    Args:
        rows: the number of samples of each step and rank.
        lengths: the number of tokens of each sample that are not padding, taken in turn; without
            masks, the first one determines that of all samples of a rank.
    """

    model: str = "dense"
    loss: str = "mse"
    reduction: str | None = "sum_over_batch_size"
    weights: str | None = None
    rests: bool = False
    ends: bool = False
    penalty: str | None = None
    adds: str | None = None
    normalizes: bool = False
    optimizer: str = "SGD"
    clips: str | None = None
    accumulates: int | None = None
    scales: bool = False
    wraps: str | None = None
    way: str = "fit"
    runs: str = OPTIONS["runs"][0]
    after: str | None = None
    rows: tuple = ((ROWS,),) * STEPS
    lengths: tuple = (TOKENS,)

    def has(self, feature):
        """Returns whether the values of this case are among those of a feature."""
        return all(getattr(self, name) in values for name, values in feature.items())


@st.composite
def cases(draw, feature, ranks):
    """Draws a case with the values of a feature.

    All choices follow from a number, so that the first example of Hypothesis, in which it takes the
    simplest of everything, is a case like any other.
    """
    number = draw(st.integers(0, 2**32))
    one_of = random.Random(f"{SEED} {feature} {ranks} {number}").choice
    chosen = {}
    for name in [*feature, *(name for name in OPTIONS if name not in feature)]:
        choices = feature.get(name, OPTIONS[name])
        chosen[name] = one_of([value for value in choices if goes_with(chosen, name, value)])
    counts = list(range(1, ROWS + 1)) if chosen["rests"] else [ROWS]
    rows = [[one_of(counts) for _ in range(ranks)] for _ in range(STEPS)]
    if BACKEND == "jax":  # it compiles for each shape
        rows = [list(rows[0]) for _ in rows]
    if chosen["ends"]:  # at least one rank has data for all steps
        for rank in range(1, ranks):
            for step in range(one_of([1, 2]), STEPS):
                rows[step][rank] = 0
    lengths = tuple(one_of(range(TOKENS + 1)) for _ in range(8))
    return Case(**chosen, rows=tuple(map(tuple, rows)), lengths=lengths)


def goes_with(chosen, name, value):
    """Returns whether a value of an option goes together with those chosen before."""
    now = {**chosen, name: value}
    return not any(
        name in pair and all(key in now and now[key] in values for key, values in pair.items())
        for pair in EXCLUDED
    )


# --- Data


def batch_of(case, step, rank):
    """Returns `(x, y)` or `(x, y, weights)` of a step of a rank; later ranks weigh more."""
    rng, rows = np.random.default_rng((step, rank)), case.rows[step][rank]
    shape = (rows, TOKENS) if case.model in SEQUENCES else (rows,)
    if case.model in EMBEDDED:
        x = rng.integers(1, WORDS, shape)
    else:
        features = (4,) if case.model == "LSTM" else (4, 4, 1)
        x = rng.standard_normal((*shape, *features)).astype("float32")
    if case.loss in ("mse", "function"):
        y = rng.standard_normal((*shape, CLASSES)).astype("float32")
    else:
        y = rng.integers(0, CLASSES, shape)
    weights = (1 + rank) * rng.random(shape).astype("float32")
    if case.model in SEQUENCES:
        for row in range(rows):
            length = case.lengths[(7 * step + 3 * rank + row) % len(case.lengths)]
            if case.model == "unmasked":  # one length on each of up to three ranks
                length = 1 + (case.lengths[0] + 2 * rank) % TOKENS
            # The average over no tokens, in one of several outputs, is not a number.
            x[row, max(length, case.model in SEVERAL) :] = 0
        x[0, :1], y[0, :1] = (x[0, :1], y[0, :1]) if rank else (1, 0)  # something counts
        if case.weights == "samples":  # next to masks, Keras takes a weight for each token
            weights[:] = weights[:, :1]
    if case.model in SEVERAL:
        y, weights = {"each": y, "all": y[:, 0]}, {"each": weights, "all": weights[:, 0]}
    return (x, y, weights) if case.weights in ("samples", "tokens") else (x, y)


def batches_of(case, ranks):
    """Returns the batches of some ranks: in each step those of all that have one, in rank order."""
    batches = []
    for step in range(STEPS):
        parts = [batch_of(case, step, rank) for rank in ranks if case.rows[step][rank]]
        if parts:
            batches.append(keras.tree.map_structure(lambda *rows: np.concatenate(rows), *parts))
    return batches


def trimmed(batches):
    """Takes off the tokens that are padding in all samples of these batches."""
    used = [(x != 0).reshape(*x.shape[:2], -1).any(axis=(0, 2)) for x, *_ in batches]
    longest = max(1, int(np.any(used, axis=0).sum()))
    return keras.tree.map_structure(
        lambda rows: rows[:, :longest] if rows.shape[1:2] == (TOKENS,) else rows, batches
    )


class Batches(keras.utils.PyDataset):
    def __init__(self, batches):
        super().__init__()
        self.batches = batches

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, index):
        return self.batches[index]
