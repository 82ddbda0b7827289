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
from data_ranks import on_ranks
from data_sources import PyBatches, Samples, TorchSamples

import keras_dist
from keras_dist import data, errors
from keras_dist.data import epochs, sharding
from keras_dist.data.nested import SomeRows
from keras_dist.data.shard_options import ShardOptions

pytestmark = pytest.mark.skipif(keras_dist.size() > 1, reason="for one process")


class TorchStream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(torch.arange(7))


class TorchStreamOfLength(TorchStream):
    def __len__(self):
        return 7


def sources_of(made, size, **arguments):
    """Returns the source of each rank of a job."""
    for rank in range(size):
        options = ShardOptions(**arguments, rank=rank, size=size)
        yield sharding._source(made, options)


def parts_of(made, size, **arguments):
    return on_ranks(size, lambda: data.shard(made, **arguments))


def first_leaf(batch):
    return np.asarray(tf.nest.flatten(batch)[0])


def epoch_of(part):
    """Returns the sample numbers of one epoch, by batch."""
    return [first_leaf(batch).reshape(len(batch), -1)[:, 0].tolist() for batch in part]


def flat(parts):
    return [number for epoch in parts for batch in epoch for number in batch]


# --- Properties of each kind


def test_pandas_data_is_converted_as_by_keras():
    frame = pd.DataFrame({"a": [0.5, 1.5, 2.5], "b": [1, 2, 3]})
    [part] = parts_of((frame, frame["b"], frame["a"]), 1, batch_size=3, shuffle=False)
    [(x, y, weight)] = part.as_numpy_iterator()
    assert (x.dtype, x.shape, y.shape, weight.dtype) == ("float32", (3, 2), (3, 1), "float32")
    [columns] = parts_of(dict(frame), 1, batch_size=2, shuffle=False)
    assert next(columns.as_numpy_iterator())["b"].tolist() == [[1], [2]]
    frame = pd.DataFrame({"a": [0.5, 1.5], "b": [True, False], "c": pd.array([1, 2], "Int8")})
    [[x]] = [list(part.as_numpy_iterator()) for part in parts_of(frame, 1, shuffle=False)]
    assert (x.dtype, x.tolist()) == ("float32", [[0.5, 1, 1], [1.5, 0, 2]])


def test_a_loader_keeps_its_options():
    loader = torch.utils.data.DataLoader(
        range(10), 4, drop_last=True, collate_fn=lambda rows: torch.tensor(rows) + 100
    )
    part = parts_of(loader, 2)[1]
    assert isinstance(part, torch.utils.data.DataLoader)
    assert epoch_of(part) == epoch_of(part) == [[101, 103, 105, 107]]


def test_a_loader_whose_batches_overtake_each_other_is_not_restored():
    for in_order in (True, False):
        [part] = parts_of(torch.utils.data.DataLoader(range(9), in_order=in_order), 1)
        assert bool(epochs.of(part).not_restored) is not in_order


def test_a_loader_that_saves_its_state_is_sharded():
    """The loader of torchdata has a sampler of its own, of no class of torch."""
    names = {"__module__": "torchdata.stateful_dataloader.sampler", "replacement": False}
    kind = type("RandomSampler", (torch.utils.data.Sampler,), {**names, "__iter__": None})
    loader = torch.utils.data.DataLoader(range(9), 3, sampler=kind())
    parts = parts_of(loader, 2)
    assert sorted(flat(first := [epoch_of(part) for part in parts])) == list(range(9))
    assert first != [epoch_of(part) for part in parts]


def test_a_py_dataset_keeps_its_workers_and_epoch_hooks():
    class Counted(PyBatches):
        begun = 0

        def on_epoch_begin(self):
            self.begun += 1

    mine = Counted(30)
    mine.workers, mine.max_queue_size = 2, 3
    [part] = parts_of(mine, 1)
    assert (part.workers, part.max_queue_size) == (2, 3)
    list(part)
    assert mine.begun == 1


def test_an_iterator_continues_across_epochs():
    parts = [parts_of(itertools.count(), 2, batch_size=2, steps=3)[rank] for rank in range(2)]
    assert parts[1][0].tolist() == [1, 3]  # inspected before the epoch, as by Keras
    for epoch in range(2):
        numbers = flat([epoch_of(part) for part in parts])
        assert sorted(numbers) == list(range(12 * epoch, 12 * epoch + 12))
    came_to = epochs.numbers()
    for size, batch in ((2, [24, 26]), (1, [24, 25, 26, 27])):  # also on another number of ranks
        later = parts_of(itertools.count(), size, batch_size=4 // size, steps=3)[0]
        epochs.restore(came_to)
        assert epoch_of(later)[0] == batch


def test_an_iterable_is_a_stream():
    loader = torch.utils.data.DataLoader(TorchStream(), batch_size=2)
    parts = parts_of(loader, 2)
    assert sorted(flat([epoch_of(part) for part in parts])) == list(range(7))
    for stream in (TorchStreamOfLength(), torch.utils.data.ChainDataset([TorchStream()])):
        parts = parts_of(stream, 2, batch_size=2)
        assert sorted(flat([epoch_of(part) for part in parts])) == list(range(7))
    [whole] = parts_of(iter([np.arange(4), np.arange(4)]), 1, batched=True, steps=2)
    assert epoch_of(whole) == [[0, 1, 2, 3]] * 2


def test_samples_of_tf_data_are_in_batches_of_32():
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


def test_ranks_whose_windows_keras_has_shuffled_differently_are_refused():
    def windows(**options):
        return keras.utils.timeseries_dataset_from_array(
            np.arange(20), None, 1, shuffle=True, **options
        )

    tf.random.set_seed(None)
    with pytest.raises(errors.MismatchError, match="the seed of its last shuffle"):
        on_ranks(2, lambda: data.shard(windows()))
    samples = flat([epoch_of(part) for part in on_ranks(2, lambda: data.shard(windows(seed=1)))])
    assert sorted(samples) == list(range(20))


# Rows of an array, those of the same row on another rank, and whether they are taken for equal.
ROWS = {
    "the order of sums": ([1000.0, 1e-8], [1000.1, -1e-8], True),
    "zeros": ([0.0, 0.0], [0.0, 0.0], True),
    "missing": ([1.0, np.nan], [1.0, np.nan], True),
    "missing in one": ([1.0, np.nan], [1.0, 2.0], False),
    "infinite": ([1.0, np.inf], [1.0, -np.inf], False),
    "numbers": ([1.0, 2.0], [1.1, 2.0], False),
    "half floats": (np.array([1, 2], "float16"), np.array([1.001, 2], "float16"), True),
    "decoded pictures": (np.array([200, 7], "uint8"), np.array([201, 6], "uint8"), True),
    "classes": (np.array([3, 7], "uint8"), np.array([4, 7], "uint8"), False),
    "tokens": ([10001, 2], [10002, 2], False),
    "text": (["a", "b"], ["a", "c"], False),
}


@pytest.mark.parametrize("rows", ROWS)
def test_rows_of_ranks_are_compared_as_far_as_ranks_compute_them_alike(rows):
    one, other, are_equal = ROWS[rows]
    known, found = (SomeRows(np.stack([np.asarray(row)] * 3), 3) for row in (one, other))
    assert (known == found) == (found == known) == are_equal
    assert known == known and "..." not in repr(known)


def test_batches_of_an_abandoned_epoch_are_discarded():
    ahead = data.prefetch(data.shard(PyBatches(30), shuffle=False))
    ahead.on_epoch_begin()
    first = ahead[0]
    ahead.on_epoch_begin()
    assert first_leaf(ahead[0]).tolist() == first_leaf(first).tolist()
    ahead.on_epoch_end()


def test_a_batch_that_is_never_made_does_not_hold_the_exit():
    class Stuck(PyBatches):
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
    ahead = data.prefetch(data.shard(PyBatches(30), shuffle=False))
    current.device = 1  # as keras_dist.init() does before the data set is created
    ahead.on_epoch_begin()
    for step in range(len(ahead)):
        ahead[step]
    ahead.on_epoch_end()
    assert used and set(used) == {(1, False)}


# --- Random sampling


DRAWN = {
    "tensors": lambda: torch.arange(60),
    "samples": lambda: Samples(60),
    "PyDataset": lambda: PyBatches(60),
    "torch": lambda: TorchSamples(60),
    "tf.data": lambda: tf.data.Dataset.range(60),
}


@pytest.mark.parametrize("kind", DRAWN)
def test_each_rank_samples_independently(kind):
    options = {} if kind == "PyDataset" else {"batch_size": 5}

    def run(seed=0):
        parts = on_ranks(2, lambda: data.sample(DRAWN[kind](), seed=seed, **options))
        return [[[first_leaf(b).tolist() for b in part] for part in parts] for _ in range(2)]

    (one, other), second = run()
    assert len(one) == len(other) == (10 if kind == "PyDataset" else 6)
    assert one != other and [one, other] != second
    assert len({number % 2 for number in np.ravel(flat([one]))}) == 2
    assert run()[1] == second != run(1)[1]


@pytest.mark.parametrize("kind", ["samples", "tf.data", "tf.data of unknown length"])
def test_any_number_of_steps_is_sampled(kind):
    makers = {
        **DRAWN,
        "tf.data of unknown length": lambda: tf.data.Dataset.range(60).filter(lambda n: n < 60),
    }
    parts = on_ranks(2, lambda: data.sample(makers[kind](), 5, steps=40))
    assert [[len(first_leaf(batch)) for batch in part] for part in parts] == [[5] * 40] * 2


# --- Ends and counts


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
