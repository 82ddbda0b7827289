"""Training that is drawn, on n ranks and in one process: the table of docs/exactness.md.

All cases of a test have its feature; everything else is drawn. A number of the table is the largest
difference of all cases with the feature, in whichever test they were drawn.
"""

import keras
import numpy as np
import pytest
from comparison import difference
from drawn import CLIPS, EMBEDDED, SEED, cases
from hypothesis import HealthCheck, Phase, given, seed, settings

import keras_dist

pytestmark = pytest.mark.jobs("tensorflow-1", "tensorflow-2", "jax-2", "torch-2", "equality")
BACKEND = keras.backend.backend()
BOUND = 1e-5

# All of such a step is compiled on TensorFlow: no loss is divided by masks or weights.
COMPILED = {
    "runs": ["XLA"],
    "loss": ["mse", "classes"],
    "reduction": ["sum_over_batch_size", "mean"],
    "normalizes": [False],
}
FEATURES = {
    "dense layers": {"model": ["dense"]},
    "convolution": {"model": ["convolution"]},
    "tokens with masks": {"model": ["tokens"]},
    "unequal lengths without masks": {"model": ["unmasked"]},
    "LSTM with masks": {"model": ["LSTM"]},
    "several outputs, `loss_weights`": {"model": ["outputs"]},
    "`ignore_class`": {"loss": ["ignoring"]},
    "a function as loss": {"loss": ["function"]},
    "reduction `sum_over_batch_size`": {"reduction": ["sum_over_batch_size"]},
    "reduction `mean`": {"reduction": ["mean"]},
    "reduction `mean_with_sample_weight`": {"reduction": ["mean_with_sample_weight"]},
    "reduction `sum`": {"reduction": ["sum"]},
    "reduction `None`": {"reduction": [None]},
    "weights of samples": {"weights": ["samples"]},
    "weights of tokens": {"weights": ["tokens"]},
    "class weights": {"weights": ["classes"]},
    "weights of samples or tokens, `mean_with_sample_weight`": {
        "reduction": ["mean_with_sample_weight"],
        "weights": ["samples", "tokens"],
    },
    "class weights, `mean_with_sample_weight`": {
        "reduction": ["mean_with_sample_weight"],
        "weights": ["classes"],
    },
    "rests: batches of different sizes": {"rests": [True]},
    "ranks out of data": {"ends": [True]},
    "penalties of weights": {"penalty": ["l2"]},
    "`add_loss`": {"adds": ["add_loss"]},
    "`activity_regularizer`": {"adds": ["activity_regularizer"]},
    "`SyncBatchNormalization`": {"normalizes": [True]},
    "momentum": {"optimizer": ["momentum"]},
    "`Adam`": {"optimizer": ["Adam"]},
    "`Adam` of an `Embedding`": {"optimizer": ["Adam"], "model": sorted(EMBEDDED)},
    "`clipnorm`": {"clips": ["clipnorm"]},
    "`global_clipnorm`": {"clips": ["global_clipnorm"]},
    "`clipvalue`": {"clips": ["clipvalue"]},
    "clipping of an `Embedding`": {"clips": sorted(CLIPS), "model": sorted(EMBEDDED)},
    "gradient accumulation": {"accumulates": [2, 3]},
    "loss scale": {"scales": [True]},
    "`shard_state`": {"wraps": ["shard_state"]},
    "`compression` within a node": {"wraps": ["compression"]},
    "`fit`": {"way": ["fit"]},
    "`train_on_batch`": {"way": ["train_on_batch"]},
    "a loop by hand with `loss_scale`": {"way": ["loop"]},
    "graph (`jit_compile=False`)": {"runs": ["graph"]},
    "XLA (`jit_compile=True`)": {"runs": ["XLA"]},
    "XLA, dense layers, `fit`": {"model": ["dense"], "way": ["fit"], **COMPILED},
    "XLA, unequal lengths without masks": {"model": ["unmasked"], **COMPILED},
    "XLA, several outputs with masks": {"model": ["outputs"], "runs": ["XLA"]},
    "`evaluate`": {"after": ["evaluate"]},
    "`evaluate`, unequal lengths without masks": {"after": ["evaluate"], "model": ["unmasked"]},
    "`predict`": {"after": ["predict"]},
}
# One rank reduces nothing. Each of these has code of its own; what else its cases have is drawn.
OF_ONE_RANK = [
    "XLA, dense layers, `fit`",
    "`SyncBatchNormalization`",
    "a loop by hand with `loss_scale`",
    "`predict`",
]
EACH_OCCURRENCE = "in one process, Keras takes each occurrence of a token by itself"
COMPILES_FOR_MINUTES = "Keras on torch compiles for minutes"
MISSING = {
    "tensorflow": {
        "`Adam` of an `Embedding`": EACH_OCCURRENCE,
        "clipping of an `Embedding`": EACH_OCCURRENCE,
    },
    "jax": {
        "reduction `None`": "Keras on JAX trains with a single number",
        "graph (`jit_compile=False`)": "JAX has no graph besides XLA",
    },
    "torch": {
        "reduction `None`": "Keras on torch trains with a single number",
        "graph (`jit_compile=False`)": "Keras on torch has no graph",
        "XLA (`jit_compile=True`)": COMPILES_FOR_MINUTES,
        "XLA, dense layers, `fit`": COMPILES_FOR_MINUTES,
        "XLA, unequal lengths without masks": COMPILES_FOR_MINUTES,
        "XLA, several outputs with masks": COMPILES_FOR_MINUTES,
    },
}[BACKEND]
CASES = {1: 8, 2: 22, 3: 22}  # on each number of ranks

drawn = set()  # the cases so far
shown = set()  # their features


def titles_of(case):
    return [title for title, values in FEATURES.items() if case.has(values)]


def draw(feature, count, record_property):
    """Draws cases with the values of a feature, and compares each with one process."""

    # No shrinking: it would take the time of many cases.
    @seed(SEED)
    @settings(max_examples=count, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(cases(feature, keras_dist.size()))
    def check(case):
        if case in drawn:
            return
        everyone = keras_dist.allgather_object((str(case), difference(case)))
        assert len({text for text, _ in everyone}) == 1, "the ranks have drawn different cases"
        seen = float(np.max([seen for _, seen in everyone]))
        alone = f'mpiexec -n {keras_dist.size()} python tests/ranks/comparison.py "{case}"'
        assert seen <= BOUND, (
            f"{seen:.1e} from one process with EXACTNESS_SEED={SEED}. This case alone:\n{alone}"
        )
        drawn.add(case)
        shown.update(titles_of(case))
        record_property("difference", (seen, titles_of(case)))

    check()


@pytest.mark.exactness("{feature}")
@pytest.mark.parametrize("feature", FEATURES if keras_dist.size() > 1 else OF_ONE_RANK)
def test_n_ranks_train_like_one_process(feature, record_property):
    if feature in MISSING:
        pytest.skip(MISSING[feature])
    if feature not in shown:  # by a case of another feature
        draw(FEATURES[feature], 1, record_property)
    assert feature in shown


@pytest.mark.limit(300)
def test_further_cases_train_like_one_process(record_property):
    count = CASES[keras_dist.size()] - len(drawn)
    if count > 0:
        draw({}, count, record_property)
    assert len(drawn) >= CASES[keras_dist.size()]
