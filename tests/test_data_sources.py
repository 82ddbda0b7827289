"""Every kind of data, with random access or iterated, on any number of ranks."""

import concurrent.futures
import contextlib
import itertools
import threading

import keras
import numpy as np
import pandas as pd
import pytest
import tensorflow as tf
import torch
from hypothesis import given
from hypothesis import strategies as st

import keras_dist
from keras_dist import data, errors
from keras_dist.data import epochs, sharding
from keras_dist.data.order import Order
from keras_dist.data.partition import plan_samples
from keras_dist.data.shard_options import ShardOptions

pytestmark = pytest.mark.skipif(keras_dist.size() > 1, reason="for one process")


class Batches(keras.utils.PyDataset):
    """A PyDataset of numbered samples in batches of 3."""

    def __init__(self, count, **options):
        super().__init__(**options)
        self.count, self.begun = count, 0

    def __len__(self):
        return -(-self.count // 3)

    def __getitem__(self, index):
        return np.arange(3 * index, min(3 * index + 3, self.count), dtype="float32")[:, None]

    def on_epoch_begin(self):
        self.begun += 1


class Numbered:
    """A random access source of grain: a length and samples by index."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return {"x": np.float32(index), "y": (index, 1.5)}


class TorchNumbers(torch.utils.data.Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return torch.tensor([index])


class TorchStream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(torch.arange(7))


def rows_in_batches(count):
    for index in range(0, count, 3):
        yield np.arange(index, min(index + 3, count))


SOURCES = {
    "frame": lambda count: pd.DataFrame({"a": np.arange(count), "b": 0}),
    "tensors": lambda count: (torch.arange(count), tf.range(count), None),
    "samples": Numbered,
    "PyDataset": Batches,
    "torch": TorchNumbers,
    "loader": lambda count: torch.utils.data.DataLoader(TorchNumbers(count), 3, shuffle=True),
    "generator": lambda count: lambda: iter(range(count)),
    "generator of batches": lambda count: lambda: rows_in_batches(count),
}
OF_BATCHES = ("PyDataset", "generator of batches")


def batch_size_of(kind):
    return None if kind in (*OF_BATCHES, "loader") else 3


def sources_of(made, size, **arguments):
    """Returns the source of each rank of a job."""
    for rank in range(size):
        options = ShardOptions(**arguments, rank=rank, size=size, where=f"[rank {rank} of {size}]")
        yield sharding._source(made, options)


def parts_of(made, size, **arguments):
    sources = list(sources_of(made, size, **arguments))
    return [source.part([getattr(other, "held", None) for other in sources]) for source in sources]


def first_leaf(batch):
    return np.asarray(tf.nest.flatten(batch)[0])


def epoch_of(part):
    """Returns the sample numbers of one epoch, by batch."""
    batches = [first_leaf(batch) for batch in part]
    assert len(batches) == len(part)
    return [batch.reshape(len(batch), -1)[:, 0].astype(int).tolist() for batch in batches]


def flat(parts):
    return [number for epoch in parts for batch in epoch for number in batch]


# --- Coverage and order


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("remainder", ["uneven", "pad", "drop"])
def test_ranks_cover_all_samples(kind, remainder):
    for size, count in [(1, 23), (2, 12), (3, 37), (4, 23)]:
        options = {"batch_size": batch_size_of(kind), "remainder": remainder}
        parts = parts_of(SOURCES[kind](count), size, **options)
        for _ in range(2):
            epochs_of_ranks = [epoch_of(part) for part in parts]
            assert len(set(map(len, epochs_of_ranks))) == 1
            assert all(batch for epoch in epochs_of_ranks for batch in epoch)
            numbers = flat(epochs_of_ranks)
            if remainder == "drop":
                assert len(numbers) == len(set(numbers)) > 0
            else:
                assert set(numbers) == set(range(count))
            assert remainder != "uneven" or len(numbers) == count
            repeated = len(numbers) - count
            assert remainder != "pad" or repeated < size * (3 if kind in OF_BATCHES else 1)


@pytest.mark.parametrize("kind", [kind for kind in SOURCES if "generator" not in kind])
def test_orders_follow_from_seed_and_epoch(kind):
    def run(seed):
        [part] = parts_of(SOURCES[kind](40), 1, batch_size=batch_size_of(kind), seed=seed)
        return [epoch_of(part) for _ in range(2)], part

    (first, second), part = run(0)
    assert first != second
    assert run(0)[0] == [first, second] != run(1)[0]
    came_to = epochs.numbers()
    third = epoch_of(part)
    [resumed] = parts_of(SOURCES[kind](40), 1, batch_size=batch_size_of(kind))
    epochs.restore({name: came_to[name] for name in list(epochs.numbers())[:1]})
    assert epoch_of(resumed) == third


@pytest.mark.parametrize("kind", ["tensors", "torch", "tf.data", "tf.data shuffled"])
def test_a_global_order_is_one_for_any_number_of_ranks(kind):
    def make():
        if kind in SOURCES:
            return SOURCES[kind](50)
        numbers = tf.data.Dataset.range(50)
        return numbers.shuffle(50).batch(12) if kind == "tf.data shuffled" else numbers

    def steps(size):
        batched = True if kind == "tf.data shuffled" else None
        options = {"shuffle": "global", "global_batch_size": 12, "batched": batched}
        parts = parts_of(make(), size, **options)
        return [
            [sorted(flat([step])) for step in zip(*map(epoch_of, parts), strict=True)]
            for _ in range(2)
        ]

    once = steps(1)
    for size in (2, 3, 4):
        for epoch, expected in zip(steps(size), once, strict=True):
            assert epoch[:3] == expected[:3]  # the last step may include the remainder
            assert sorted(flat([epoch])) == list(range(50))
    assert once[0][0] != once[1][0] != list(range(12))


@given(st.integers(4, 200), st.integers(1, 9), st.integers(0, 3), st.integers(0, 3))
def test_a_global_order_does_not_depend_on_the_ranks(total, batch, seed, epoch):
    def steps(size):
        found = []
        for rank in range(size):
            plan = plan_samples(total, size, rank, 12 * batch // size, "uneven")
            order = Order("global", seed, total).of(plan, epoch)
            found.append([set(order[slice(*plan.bounds(step))]) for step in range(plan.steps)])
        return [set().union(*step) for step in zip(*found, strict=True)]

    once = steps(1)
    for size in (2, 3, 4):
        each = steps(size)
        assert sum(map(len, each)) == total and set().union(*each) == set(range(total))
        assert each[:-1] == once[: len(each) - 1]


# --- Properties of each kind


def test_pandas_data_is_converted_as_by_keras():
    frame = pd.DataFrame({"a": [0.5, 1.5, 2.5], "b": [1, 2, 3]})
    [part] = parts_of((frame, frame["b"], frame["a"]), 1, batch_size=3, shuffle=False)
    [(x, y, weight)] = part.as_numpy_iterator()
    assert (x.dtype, x.shape, y.shape, weight.dtype) == ("float32", (3, 2), (3, 1), "float32")
    [columns] = parts_of(dict(frame), 1, batch_size=2, shuffle=False)
    assert next(columns.as_numpy_iterator())["b"].tolist() == [[1], [2]]


def test_a_loader_keeps_its_options():
    loader = torch.utils.data.DataLoader(
        TorchNumbers(10), 4, drop_last=True, collate_fn=lambda rows: torch.stack(rows) + 100
    )
    part = parts_of(loader, 2)[1]
    assert isinstance(part, torch.utils.data.DataLoader)
    assert epoch_of(part) == epoch_of(part) == [[101, 103, 105, 107]]


def test_a_py_dataset_keeps_its_workers_and_epoch_hooks():
    mine = Batches(30, workers=2, max_queue_size=3)
    [part] = parts_of(mine, 1)
    assert (part.workers, part.max_queue_size) == (2, 3)
    epoch_of(part)
    assert mine.begun == 1


def test_an_iterator_continues_across_epochs():
    parts = [
        parts_of(itertools.count(), 2, batch_size=2, steps=3)[0],
        parts_of(itertools.count(), 2, batch_size=2, steps=3)[1],
    ]
    assert parts[1][0].tolist() == [1, 3]  # inspected before the epoch, as by Keras
    for epoch in range(2):
        numbers = flat([epoch_of(part) for part in parts])
        assert sorted(numbers) == list(range(12 * epoch, 12 * epoch + 12))
    later = parts_of(itertools.count(), 2, batch_size=2, steps=3)[0]
    epochs.restore({next(iter(epochs.numbers())): 2})
    assert epoch_of(later)[0] == [24, 26]


def test_an_iterable_is_a_stream():
    loader = torch.utils.data.DataLoader(TorchStream(), batch_size=2)
    parts = parts_of(loader, 2)
    assert sorted(flat([epoch_of(part) for part in parts])) == list(range(7))
    [whole] = parts_of(iter([np.arange(4), np.arange(4)]), 1, batched=True, steps=2)
    assert epoch_of(whole) == [[0, 1, 2, 3]] * 2


def test_batches_of_tf_data_can_be_rebatched():
    batches = tf.data.Dataset.range(23).batch(5)
    parts = parts_of(batches, 2, batched=True, batch_size=4)
    read = [epoch_of(part) for part in parts]
    assert sorted(flat(read)) == list(range(23)) and {len(epoch[0]) for epoch in read} == {4}
    [single] = parts_of(tf.data.Dataset.range(40), 1, batched=False)
    assert len(epoch_of(single)[0]) == 32


def test_a_final_shuffle_of_tf_data_is_replaced():
    def run():
        shuffled = tf.data.Dataset.range(30).shuffle(30).batch(4, drop_remainder=True)
        parts = parts_of(shuffled.prefetch(1), 2)
        return [[epoch_of(part) for part in parts] for _ in range(2)]

    first, second = run()
    assert [first, second] == run() and first != second
    assert len(set(flat(first))) == len(flat(first)) == 24


def test_batches_of_an_abandoned_epoch_are_discarded():
    ahead = data.prefetch(data.shard(Batches(30), shuffle=False))
    ahead.on_epoch_begin()
    first = ahead[0]
    ahead.on_epoch_begin()
    assert first_leaf(ahead[0]).tolist() == first_leaf(first).tolist()
    ahead.on_epoch_end()


def test_a_batch_that_is_never_made_does_not_hold_the_exit():
    class Stuck(Batches):
        def __getitem__(self, index):
            if threading.current_thread() is not threading.main_thread():
                begun.set()
                released.wait(60)
            return super().__getitem__(index)

    begun, released = threading.Event(), threading.Event()
    ahead = data.prefetch(data.shard(Stuck(30), shuffle=False))
    ahead.on_epoch_begin()
    reader = threading.Thread(target=lambda: ahead[0], daemon=True)
    reader.start()
    assert begun.wait(60)
    try:
        makers = [t for t in threading.enumerate() if "prefetch" in t.name]
        assert makers and all(thread.daemon for thread in makers)
        # Threads of pools are joined at exit although they are daemons.
        assert not set(makers) & set(concurrent.futures.thread._threads_queues)
    finally:
        released.set()
        reader.join()
        ahead.on_epoch_end()
    assert not any(thread.is_alive() for thread in makers)


def test_torch_batches_go_to_the_device_of_the_training_thread(monkeypatch):
    current = threading.local()  # the CUDA device of a thread is 0 until the thread sets it
    current_device = lambda: getattr(current, "device", 0)  # noqa: E731
    used = []

    @contextlib.contextmanager
    def on_device(device):
        before, current.device = current_device(), device
        yield
        current.device = before

    def noted(tensor, **_):
        used.append((current_device(), threading.current_thread() is threading.main_thread()))
        return tensor

    monkeypatch.setattr(keras.config, "backend", lambda: "torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", current_device)
    monkeypatch.setattr(torch.cuda, "device", on_device)
    monkeypatch.setattr(torch.Tensor, "pin_memory", noted)
    monkeypatch.setattr(torch.Tensor, "cuda", noted)
    ahead = data.prefetch(data.shard(Batches(30), shuffle=False))
    current.device = 1  # as keras_dist.init() does before the data set is created
    ahead.on_epoch_begin()
    for step in range(len(ahead)):
        ahead[step]
    ahead.on_epoch_end()
    assert used and set(used) == {(1, False)}


def test_keras_trains_on_each():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    pairs = lambda: ((np.ones((2, 1)), np.ones((2, 1))) for _ in range(5))  # noqa: E731

    class Pairs(TorchNumbers):
        def __getitem__(self, index):
            return torch.ones(1), torch.ones(1)

    for source, options in [(pairs, {}), (pairs(), {"steps": 2}), (Pairs(9), {"batch_size": 2})]:
        part = data.shard(source, **options)
        before = int(model.optimizer.iterations)
        model.fit(part, epochs=2, verbose=0)
        assert int(model.optimizer.iterations) - before == 2 * len(part)


# --- Random sampling


@pytest.mark.parametrize("kind", ["tensors", "samples", "PyDataset", "torch", "tf.data"])
def test_each_rank_samples_independently(kind):
    options = {} if kind in OF_BATCHES else {"batch_size": 5}

    def run(seed=0):
        made = SOURCES[kind](60) if kind in SOURCES else tf.data.Dataset.range(60)
        parts = parts_of(made, 2, draws=True, seed=seed, **options)
        return [[epoch_of(part) for part in parts] for _ in range(2)]

    (one, other), second = run()
    assert len(one) == len(other) == (10 if kind in OF_BATCHES else 6)
    assert one != other and [one, other] != second
    assert len({number % 2 for number in flat([one])}) == 2
    assert run()[1] == second != run(1)[1]


# --- Bad input


@pytest.mark.parametrize(
    ("made", "arguments", "error", "culprit"),
    [
        (Batches(5), {}, errors.DataError, "at least 4 batches"),
        (Numbered(3), {}, errors.DataError, "at least 4 samples"),
        (Numbered(0), {}, errors.DataError, "samples"),
        (TorchNumbers(3), {}, errors.DataError, "at least 4 samples"),
        (lambda: iter(range(3)), {"batch_size": 1}, errors.DataError, "at least 4 samples"),
        (lambda: 3, {}, errors.ArgumentTypeError, "return a generator"),
        (iter(range(9)), {}, errors.DataError, "Pass steps"),
        (lambda: iter([1]), {"shuffle": True}, errors.ArgumentError, "no shuffle"),
        (lambda: iter([1]), {"draws": True}, errors.ArgumentError, "random access to samples"),
        (Batches(90), {"batch_size": 3}, errors.ArgumentError, "no batch_size"),
        (Batches(90), {"batched": False}, errors.ArgumentError, "batched=False"),
        (pd.DataFrame({"a": ["x"] * 9, "b": 1}), {}, errors.ArgumentTypeError, "dict(frame)"),
        (np.arange(9), {"global_batch_size": 6}, errors.ArgumentError, "multiple of 4"),
        (
            np.arange(9),
            {"global_batch_size": 8, "batch_size": 3},
            errors.ArgumentError,
            "one of the two",
        ),
        (
            torch.utils.data.DataLoader(
                TorchNumbers(9), sampler=torch.utils.data.WeightedRandomSampler([1] * 9, 9)
            ),
            {},
            errors.ArgumentError,
            "WeightedRandomSampler",
        ),
        (["a"] * 4, {"reader": len, "shuffle": "global"}, errors.ArgumentError, "reader(files)"),
    ],
)
def test_bad_input_is_refused(made, arguments, error, culprit):
    with pytest.raises(error, match=r"^\[rank 0 of 4\] Expected .* Received: ") as caught:
        list(sources_of(made, 4, **arguments))
    assert culprit in str(caught.value)


def test_a_stream_that_ends_early_is_an_error():
    [part] = parts_of(lambda: iter(range(9)), 1, batch_size=2, steps=5)
    with pytest.raises(errors.DataError, match="data that ended after 4"):
        epoch_of(part)


def test_steps_per_epoch_are_those_of_shard():
    for count, options in [(33, {"batch_size": 8}), (33, {"global_batch_size": 8}), (33, {})]:
        assert data.steps_per_epoch(count, **options) == len(
            data.shard(np.arange(count), **options)
        )
    with pytest.raises(errors.DataError, match="at least 1 samples"):
        data.steps_per_epoch(0)
