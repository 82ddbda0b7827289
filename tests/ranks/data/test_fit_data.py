"""Sharded arrays and `PyDataset` in `fit` on every backend: each sample once, in equal steps."""

import keras
import numpy as np
import pytest

import keras_dist
from keras_dist.data import shard

pytestmark = pytest.mark.jobs("hooks", "jax-2")

BATCH = 4
TOTAL = 16 * keras_dist.size() + 1  # rank 0 has one sample more than the others


class Numbered(keras.utils.PyDataset):
    """Batches of consecutive numbers."""

    def __len__(self):
        return -(-TOTAL // BATCH)

    def __getitem__(self, index):
        x = np.arange(index * BATCH, min(TOTAL, (index + 1) * BATCH), dtype="float32")[:, None]
        return x, x


def arrays():
    x = np.arange(TOTAL, dtype="float32")[:, None]
    return shard((x, x), BATCH)


def model_of(distributed=True, **options):
    """A model whose metrics are the mean of its targets and of their squares."""
    means = [
        keras.metrics.MeanMetricWrapper(lambda y_true, y_pred: y_true, name="mean"),
        keras.metrics.MeanMetricWrapper(lambda y_true, y_pred: y_true**2, name="mean_square"),
    ]
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.0)
    if distributed:
        optimizer = keras_dist.DistributedOptimizer(optimizer)
    model.compile(optimizer, "mse", metrics=means, **options)
    return model


EAGERLY = keras.backend.backend() == "tensorflow"  # tracing takes longest


@pytest.mark.parametrize("make", [arrays, lambda: shard(Numbered())], ids=["arrays", "PyDataset"])
def test_fit_trains_on_every_sample_once_an_epoch(make):
    model = model_of()
    steps = []
    count = keras.callbacks.LambdaCallback(on_train_batch_end=lambda step, logs: steps.append(step))
    history = model.fit(make(), epochs=2, verbose=0, callbacks=keras_dist.callbacks(count)).history
    numbers = np.arange(TOTAL)
    assert history["mean"] == pytest.approx([numbers.mean()] * 2)
    assert history["mean_square"] == pytest.approx([(numbers**2).mean()] * 2)
    assert len(set(keras_dist.allgather_object(tuple(steps)))) == 1


@pytest.mark.parametrize(
    ("kind", "shuffle"), [("arrays", True), ("arrays", False), ("elements", True)]
)
def test_an_epoch_of_fewer_steps_reads_on_where_the_one_before_ended(kind, shuffle):
    numbers = np.arange(16 * keras_dist.size(), dtype="float32")[:, None]
    data = (numbers, numbers) if kind == "arrays" else lambda: zip(numbers, numbers, strict=True)
    model = model_of(run_eagerly=EAGERLY)
    data = shard(data, BATCH, **({"shuffle": shuffle} if kind == "arrays" else {}))
    how = {"steps_per_epoch": 2, "verbose": 0, "callbacks": keras_dist.callbacks()}
    # The first fit ends within the data; the next one begins with the first batch of an epoch.
    model.fit(data, epochs=3, shuffle=shuffle, **how)
    found = np.reshape(model.fit(data, epochs=4, shuffle=shuffle, **how).history["mean"], (2, 2))
    assert found.mean(1) == pytest.approx([numbers.mean()] * 2)
    if not (kind == "arrays" and shuffle):
        halves = [half.mean() for half in np.split(numbers, 2)]
        assert found.ravel() == pytest.approx(halves * 2)


def pairs(count=TOTAL):
    for number in np.arange(count, dtype="float32")[:, None]:
        yield number, number


LOOPED = {
    "arrays": arrays,
    "global order": lambda: shard(
        (np.arange(TOTAL, dtype="float32")[:, None],) * 2, BATCH, shuffle="global"
    ),
    "PyDataset": lambda: shard(Numbered()),
    "prefetched": lambda: keras_dist.data.prefetch(arrays()),
    "stream": lambda: shard(pairs, BATCH),
    "iterator": lambda: shard(pairs(2 * TOTAL), BATCH, steps=2),  # each epoch reads on
    "prefetched iterator": lambda: keras_dist.data.prefetch(LOOPED["iterator"]()),
}


def one_pass(data):
    """The numbers of a loop, by batch."""
    return [np.asarray(x)[:, 0].astype(int).tolist() for x, _ in data]


def means_in_fit(data, epochs, distributed=True):
    """The mean of all numbers until each step, by epoch."""
    seen = []
    record = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda *_: seen.append([]),
        on_train_batch_end=lambda _, logs: seen[-1].append(float(logs["mean"])),
    )
    model = model_of(distributed, run_eagerly=EAGERLY)
    model.fit(data, epochs=epochs, verbose=0, callbacks=[record])
    return seen


def means(batches):
    flat, ends = np.concatenate(batches), np.cumsum([len(batch) for batch in batches])
    return (np.cumsum(flat)[ends - 1] / ends).tolist()


@pytest.mark.long
@pytest.mark.parity("each loop over a shard is the next epoch, in the order of `fit`")
@pytest.mark.parametrize("kind", LOOPED)
def test_each_loop_over_a_shard_is_an_epoch_of_fit(kind):
    data = LOOPED[kind]()
    passes = [one_pass(data), one_pass(data)]
    assert (passes[0] == passes[1]) == (kind == "stream")
    for batches, seen in zip(passes, means_in_fit(LOOPED[kind](), 2), strict=True):
        assert seen == pytest.approx(means(batches), rel=1e-5)
    # Loops and epochs of `fit` in turn, and a loop that is left early.
    for _ in data:
        break
    [fourth] = means_in_fit(data, 1)
    again = LOOPED[kind]()
    keras_dist.data.set_epoch(again, 3)
    assert fourth == pytest.approx(means(one_pass(again)), rel=1e-5)


def test_epochs_without_a_distributed_optimizer_have_the_same_orders():
    expected = means_in_fit(arrays(), 2)
    assert means_in_fit(arrays(), 2, distributed=False) == expected
    with pytest.raises(keras_dist.errors.ArgumentError, match="at least 0"):
        keras_dist.data.set_epoch(arrays(), -1)


@pytest.mark.parametrize("kind", ["iterator", "prefetched iterator"])
def test_an_evaluation_begins_with_the_first_element_of_an_iterator(kind):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    model.compile(loss="mae")
    found = model.evaluate(LOOPED[kind](), verbose=0, callbacks=keras_dist.callbacks())
    assert found == np.mean(range(2 * BATCH * keras_dist.size()))
