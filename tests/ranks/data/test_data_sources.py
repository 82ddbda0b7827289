"""Data in files, on several ranks and in `fit`: shards cover it, and errors reach all ranks."""

import io
import itertools
import tarfile

import keras
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import tensorflow as tf
from PIL import Image

import keras_dist
from keras_dist import data, errors

pytestmark = pytest.mark.jobs("tensorflow-2")

COUNT = 29


@pytest.fixture
def folder(tmp_path):
    """A directory of rank 0 that is visible to all ranks."""
    return keras_dist.broadcast_object(tmp_path)


def write(folder):
    """Writes the numbers of COUNT samples to three files of each format and to images."""
    for name, numbers in enumerate(np.array_split(np.arange(COUNT), 3)):
        x, y = numbers[:, None].astype("float32"), numbers.astype("float32")
        np.savez(folder / f"{name}.npz", x=x, y=y)
        pa.parquet.write_table(pa.table({"x": y, "y": y}), folder / f"{name}.parquet")
        with tf.io.TFRecordWriter(str(folder / f"{name}.tfrecord")) as records:
            for number in numbers:
                records.write(str(number).encode())
        with tarfile.open(folder / f"{name}.tar", "w") as archive:
            for number in numbers:
                info = tarfile.TarInfo(f"{number}.txt")
                info.size = len(str(number))
                archive.addfile(info, io.BytesIO(str(number).encode()))
        for number in numbers:
            (folder / "images" / f"class {number % 2}").mkdir(parents=True, exist_ok=True)
            path = folder / "images" / f"class {number % 2}" / f"{number}.png"
            Image.new("L", (2, 2), int(number)).save(path)


def parse(record):
    number = tf.strings.to_number(record)
    return number[None], number


def decode(sample):
    number = np.float32(sample["txt"])
    return number[None], number


SOURCES = {
    "npz": lambda folder, **options: data.npz(f"{folder}/*.npz", "x", "y", 4, **options),
    "parquet": lambda folder, **options: data.parquet(
        f"{folder}/*.parquet", ["x"], "y", 4, **options
    ),
    "tfrecord": lambda folder, **options: data.tfrecord(
        f"{folder}/*.tfrecord", parse, 4, **options
    ),
    "tar": lambda folder, **options: data.tar(f"{folder}/*.tar", decode, 4, **options),
    "images": lambda folder, **options: data.image_dataset(
        f"{folder}/images", (1, 1), 4, label_mode=None, color_mode="grayscale", **options
    ),
}


class Sum(keras.layers.Layer):
    """Sums sample numbers and their squares, which identify the samples of an epoch."""

    def build(self, shape):
        self.seen = self.add_weight(shape=(2,), trainable=False, initializer="zeros")
        self.scale = self.add_weight(shape=(), initializer="zeros")

    def call(self, x):
        x = keras.ops.reshape(x, (-1, 1))
        self.seen.assign_add(keras.ops.stack([keras.ops.sum(x), keras.ops.sum(x * x)]))
        return x * self.scale


def numbers_of(part):
    epoch = [batch[0] if isinstance(batch, tuple) else batch for batch in part]
    return [int(number) for batch in epoch for number in np.asarray(batch).reshape(-1)]


def of_all(mine):
    return list(itertools.chain(*keras_dist.allgather_object(mine)))


def test_every_source_hands_out_everything_once_also_after_a_fit(folder):
    if keras_dist.rank() == 0:
        write(folder)
    keras_dist.barrier()
    numbers = np.arange(COUNT)
    for name, source in SOURCES.items():
        part = source(folder)
        mine = numbers_of(part)
        assert sorted(of_all(mine)) == numbers.tolist(), name
        ahead = data.prefetch(part)
        model = keras.Sequential([Sum()])
        if name == "images":
            got = model.predict(ahead, verbose=0)
            assert len(got) == len(mine)
        else:
            model.compile("sgd", "mse", run_eagerly=True)  # tracing takes longest
            model.fit(ahead, epochs=2, verbose=0)
        seen = keras_dist.allreduce(
            keras.ops.convert_to_numpy(model.layers[0].seen), op=keras_dist.Sum
        )
        epochs = 1 if name == "images" else 2
        assert seen.tolist() == [epochs * numbers.sum(), epochs * (numbers**2).sum()], name


def raised_everywhere(error, culprit, call):
    with pytest.raises(error, match=r"^\[rank \d of \d\] Expected .* Received: ") as caught:
        call()
    said = keras_dist.allgather_object(str(caught.value))
    # If two ranks read a bad file each, each names its own.
    assert culprit in said[0] and len(set(said)) <= 2


def test_failures_are_those_of_all_ranks(folder, caplog):
    if keras_dist.rank() == 0:
        write(folder)
        for name in ("1.npz", "1.parquet", "1.tfrecord", "1.tar", "images/class 1/3.png"):
            content = (folder / name).read_bytes()
            (folder / name).write_bytes(content[: len(content) // 3])
        (folder / "images" / "class 1" / "1.png").write_text("no image")
    keras_dist.barrier()
    lost = set(np.array_split(np.arange(COUNT), 3)[1].tolist())
    for name, source in SOURCES.items():
        bad = ".png to be readable" if name == "images" else f"1.{name} to be readable"
        raised_everywhere(errors.DataError, bad, lambda source=source: source(folder))
        caplog.clear()
        part = source(folder, unreadable="skip", remainder="pad")
        got = set(of_all(numbers_of(part)))
        without = {1, 3} if name == "images" else lost
        assert got == set(range(COUNT)) - without, name
        if keras_dist.rank() == 0:
            assert f"skips {2 if name == 'images' else 1} files" in caplog.text
    if keras_dist.size() > 1:
        last = keras_dist.size() - 1
        mine = folder / f"of {keras_dist.rank()}"
        for name in "bc" if keras_dist.rank() < last else "abc":
            (mine / name).mkdir(parents=True)
            Image.new("L", (2, 2)).save(mine / name / "0.png")
        raised_everywhere(
            errors.MismatchError, "the classes of the images", lambda: data.image_dataset(mine)
        )
        part = data.image_dataset(mine, (2, 2), 1, own=True, shuffle=False, remainder="pad")
        assert part.class_names == ["a", "b", "c"]
        labels = [int(y[0]) for _, y in (map(np.asarray, batch) for batch in part)]
        assert labels == ([1, 2, 1] if keras_dist.rank() < last else [0, 1, 2])
    paths = [folder / "0.npz", folder / f"{keras_dist.rank() % 2 * 2}.npz"]
    if keras_dist.size() > 1:
        raised_everywhere(
            errors.MismatchError, "the digest of the file names", lambda: data.npz(paths, "x")
        )
