"""How far the training of a drawn case on all ranks is from that in one process.

One case alone, with the text that a failure prints:

    mpiexec -n 3 python tests/ranks/comparison.py "Case(model='dense', ...)"
"""

import sys

import keras
import numpy as np
from drawn import BACKEND, CLASSES, SEQUENCES, WORDS, Batches, Case, batches_of, trimmed

import keras_dist

# --- Models


def mean_of_squares(y_true, y_pred):
    """A loss of a user that returns a single number."""
    return keras.ops.mean(keras.ops.square(y_true - y_pred))


def loss_of(case):
    if case.loss == "function":
        return mean_of_squares
    if case.loss == "mse":
        return keras.losses.MeanSquaredError(reduction=case.reduction)
    ignored = {"ignore_class": 2} if case.loss == "ignoring" else {}
    return keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction=case.reduction, **ignored
    )


class MeanPenalty(keras.layers.Layer):
    """Adds the mean of its inputs over the batch to the loss."""

    supports_masking = True

    def call(self, inputs):
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(inputs)))
        return inputs


def model_of(case, is_alone):
    """Returns a model with equal weights in each call, its losses and their weights.

    Args:
        case: the case.
        is_alone: whether it is for one process. That must pad batches of different lengths, so
            there a mask leaves out what is not in the batches of the ranks.
    """
    keras.utils.set_random_seed(1)
    layers = keras.layers
    last = {"kernel_regularizer": case.penalty}
    if case.adds == "activity_regularizer":
        last["activity_regularizer"] = "l2"
    if case.model == "outputs":
        tokens = keras.Input((None,), dtype="int32")
        found = layers.Embedding(WORDS, 4, mask_zero=True)(tokens)
        found = MeanPenalty()(found) if case.adds == "add_loss" else found
        each = layers.Dense(CLASSES, name="each", **last)(found)
        whole = layers.Dense(CLASSES, name="all")(layers.GlobalAveragePooling1D()(found))
        losses = {"each": loss_of(case), "all": loss_of(case)}
        return keras.Model(tokens, {"each": each, "all": whole}), losses, {"each": 1, "all": 0.3}
    if case.model == "tokens":
        first = [keras.Input((None,), dtype="int32"), layers.Embedding(WORDS, 4, mask_zero=True)]
    elif case.model == "unmasked":
        first = [
            keras.Input((None,), dtype="int32"),
            layers.Embedding(WORDS, 4, mask_zero=is_alone),
        ]
    elif case.model == "LSTM":
        first = [keras.Input((None, 4)), layers.Masking(), layers.LSTM(3, return_sequences=True)]
    else:
        first = [keras.Input((4, 4, 1)), layers.Flatten(), layers.Dense(4, "tanh")]
        if case.model == "convolution":
            first.insert(1, layers.Conv2D(2, 3))
    normalization = (
        layers.BatchNormalization if is_alone else keras_dist.layers.SyncBatchNormalization
    )
    first += [normalization()] * case.normalizes + [MeanPenalty()] * (case.adds == "add_loss")
    return keras.Sequential([*first, layers.Dense(CLASSES, **last)]), loss_of(case), None


def optimizer_of(case):
    bounds = {case.clips: 0.02} if case.clips else {}
    options = {"gradient_accumulation_steps": case.accumulates, **bounds}
    if case.optimizer == "Adam":
        # A smooth function of the gradient: with a small epsilon it is close to its sign.
        plain = keras.optimizers.Adam(0.01, epsilon=0.01, **options)
    else:
        momentum = 0.9 if case.optimizer == "momentum" else 0.0
        plain = keras.optimizers.SGD(0.05, momentum=momentum, **options)
    return keras.optimizers.LossScaleOptimizer(plain, 2.0**10) if case.scales else plain


def compiled(case, optimizer, is_alone, **options):
    model, loss, weights = model_of(case, is_alone)
    model.compile(optimizer, loss=loss, loss_weights=weights, **options)
    return model


# --- Training


def in_one_process(case):
    """Returns what plain Keras computes from the batches of all ranks."""
    how = {"run_eagerly": BACKEND != "jax"}
    model = compiled(case, optimizer_of(case), is_alone=True, **how)
    train = by_batches if case.way == "train_on_batch" else by_fit
    batches = batches_of(case, range(keras_dist.size()))
    found = train(model, batches, case)
    if case.after == "evaluate":
        found["evaluate"] = model.evaluate(Batches(batches), verbose=0, return_dict=True)
    if case.after == "predict":
        found["predict"] = concatenated([model.predict_on_batch(x) for x, *_ in batches])
    return {"weights": model.get_weights(), **found}


def of_all_ranks(case):
    """Returns what the ranks compute."""
    optimizer = keras_dist.DistributedOptimizer(optimizer_of(case), **WRAPS[case.wraps])
    how = {"eagerly": {"run_eagerly": True}, "graph": {"jit_compile": False}}
    how = how.get(case.runs, {"jit_compile": True})
    model = compiled(case, optimizer, is_alone=False, **how)
    mine = batches_of(case, [keras_dist.rank()])
    # Each rank pads to its own length, unless padding counts in what is compared.
    is_trimmed = case.model in SEQUENCES and not case.adds and case.reduction and BACKEND != "jax"
    if is_trimmed or case.model == "unmasked":
        mine = trimmed(mine)
    found = WAYS[case.way](model, mine, case)
    if case.after == "evaluate":
        options = {"callbacks": keras_dist.callbacks(), "verbose": 0, "return_dict": True}
        found["evaluate"] = model.evaluate(Batches(mine), **options)
    if case.after == "predict":
        whole = Batches([(x,) for x, *_ in batches_of(case, range(keras_dist.size()))])
        found["predict"] = keras_dist.predict(model, whole, verbose=0)
    return {"weights": model.get_weights(), **found}


def concatenated(outputs):
    return keras.tree.map_structure(lambda *parts: np.concatenate(parts), *outputs)


WRAPS = {None: {}, "shard_state": {"shard_state": True}, "compression": {"compression": "bf16"}}
CLASS_WEIGHTS = {0: 0.3, 1: 1.0, 2: 4.0}


def by_fit(model, batches, case, callbacks=()):
    options = {"shuffle": False, "verbose": 0, "callbacks": callbacks}
    if case.weights == "classes":
        options["class_weight"] = CLASS_WEIGHTS
    logs = model.fit(Batches(batches), **options).history
    return {"logs": {name: values[0] for name, values in logs.items()}}


def by_fit_of_ranks(model, batches, case):
    return by_fit(model, batches, case, keras_dist.callbacks())


def by_batches(model, batches, case):
    """Returns the logs of the last batch, whatever the numbers of samples before it."""
    weights = {"class_weight": CLASS_WEIGHTS} if case.weights == "classes" else {}
    for batch in batches:
        logs = model.train_on_batch(*batch, **weights, return_dict=True)
    return {"logs": logs}


def by_batches_of_ranks(model, batches, case):
    found = by_batches(model, batches, case)
    # What a program of XLA on TensorFlow returns is the loss of this rank.
    return {} if BACKEND == "tensorflow" and case.runs == "XLA" else found


def by_hand(model, batches, case):
    """Trains in a loop of the backend, which weighs the loss of a rank by `loss_scale`."""
    model.optimizer.build(model.trainable_variables)
    loss = loss_of(case)

    def weighted(found, y, count, *weights):
        return keras_dist.loss_scale(count) * loss(y, found, *weights)

    step = STEPS_BY_HAND[BACKEND](model, weighted)
    for x, y, *weights in batches:
        count = np.float32(len(x))
        if weights and case.reduction == "mean_with_sample_weight":
            count = weights[0].sum()
        step(x, y, count, *weights)
    return {}


def tensorflow_step(model, loss):
    import tensorflow as tf

    def step(x, *given):
        with tf.GradientTape() as tape:
            value = loss(model(x, training=True), *given) + sum(model.losses)
        variables = model.trainable_variables
        model.optimizer.apply(tape.gradient(value, variables), variables)

    return step


def torch_step(model, loss):
    import torch

    def step(x, *given):
        model.zero_grad()
        (loss(model(x, training=True), *given) + sum(model.losses)).backward()
        variables = model.trainable_variables
        with torch.no_grad():
            model.optimizer.apply([variable.value.grad for variable in variables], variables)

    return step


def jax_step(model, loss):
    import jax

    groups = model.trainable_variables, model.non_trainable_variables, model.optimizer.variables

    def value_of(weights, others, x, *given):
        found, others, losses = model.stateless_call(
            weights, others, x, training=True, return_losses=True
        )
        return loss(found, *given) + sum(losses), others

    @jax.jit
    def renewed(weights, others, state, *batch):
        gradients, others = jax.grad(value_of, has_aux=True)(weights, others, *batch)
        weights, state = model.optimizer.stateless_apply(state, gradients, weights)
        return weights, others, state

    def step(*batch):
        values = renewed(*([variable.value for variable in group] for group in groups), *batch)
        for group, renewed_values in zip(groups, values, strict=True):
            for variable, value in zip(group, renewed_values, strict=True):
                variable.assign(value)

    return step


WAYS = {"fit": by_fit_of_ranks, "train_on_batch": by_batches_of_ranks, "loop": by_hand}
STEPS_BY_HAND = {"tensorflow": tensorflow_step, "jax": jax_step, "torch": torch_step}


# --- Differences


def difference(case):
    """Returns how far the ranks are from one process.

    This is the largest difference of weights, logs, evaluation and predictions, each relative to
    its norm. Rounding errors may be large relative to a bias near 0, so the difference of a single
    variable counts a tenth. Weights that are not equal on all ranks are infinitely far.
    """
    found, expected = of_all_ranks(case), in_one_process(case)
    if "logs" not in found:  # they are of this rank
        del expected["logs"]
    assert found.keys() == expected.keys()
    seen = []
    for name, wanted in expected.items():
        keras.tree.assert_same_structure(found[name], wanted)
        pairs = list(zip(*map(keras.tree.flatten, (found[name], wanted)), strict=True))
        singles = [relative([pair], np.inf) for pair in pairs]
        seen += [relative(pairs, 2), *np.divide(singles, 10)] if name == "weights" else singles
    replicas = keras_dist.allgather_object([weight.tobytes() for weight in found["weights"]])
    are_equal = all(replica == replicas[0] for replica in replicas)
    return float(np.max(seen)) if are_equal else np.inf


def relative(pairs, order):
    """Returns the norm of the difference of `(found, expected)` by that of the expected arrays."""
    one, other = (
        np.concatenate([np.ravel(each) for each in side]) for side in zip(*pairs, strict=True)
    )
    return float(np.linalg.norm(one - other, order) / (np.linalg.norm(other, order) or 1.0))


if __name__ == "__main__":
    keras_dist.init()
    print(difference(eval(sys.argv[1], {"Case": Case})))
