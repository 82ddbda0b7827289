"""Tar files of samples in the WebDataset format, read without extraction."""

import functools
import os
import re
import tarfile
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from keras_dist.data import consistency
from keras_dist.data.files import Found, Paths, Unreadable, expanded, facts_of_files
from keras_dist.data.partition import Remainder, Shuffle
from keras_dist.data.shard_options import ShardOptions, wrong_kind
from keras_dist.data.shard_source import MIXED, Decoder, Location, Read, ShardSource, found_of

KEY = "__key__"
# The names of members, and those that hold no sample, by the expressions of WebDataset.
NAME = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$")
META = re.compile(r"__[^/]*__($|/)")

Decode = Callable[[dict[str, bytes]], Any]


class Sample(NamedTuple):
    """A sample in a tar file, with field, offset and size in bytes of each member."""

    key: str
    members: tuple[tuple[str, int, int], ...]


def tar(
    files: Paths,
    decode: Decode,
    batch_size: int = 32,
    *,
    shuffle: Shuffle = True,
    seed: int = 0,
    remainder: Remainder = "uneven",
    steps: int | None = None,
    unreadable: Unreadable = "raise",
) -> Any:
    """Returns this rank's batches of samples in tar files, for `fit`.

    A sample consists of consecutive members with the same name up to a dot, as in WebDataset:
    `n01/7.jpg` and `n01/7.cls` are the sample `n01/7` with the fields `jpg` and `cls`. Fields are
    in lower case; `7.seg.PNG` is the field `seg.png`. Directories, links, members without a dot in
    their name and those whose names begin with `__...__` are left out. Members are read in place;
    nothing is extracted.

    File i belongs to rank `i % size`. With fewer files than ranks, every rank reads all files, and
    sample i belongs to rank `i % size`. Shuffling permutes the files each epoch, and the samples
    within each group of four consecutive files.

    Collective: every rank must call it with the same arguments. Blocks until each file has been
    inspected by one rank. An error on one rank is raised on all ranks.

    Args:
        files: a path, a pattern such as `"train/*.tar"`, or a list of them; not compressed.
        decode: function from a sample to nested tuples and dicts of arrays of constant shapes. The
            sample is a dict of bytes by field, as in `{"jpg": ..., "cls": b"3"}`;
            `sample["__key__"]` is its name, as bytes. Several threads call the function.
        batch_size: maximum number of samples per step on this rank. A rank with fewer samples
            than others distributes them over the same number of steps. Defaults to 32.
        shuffle: whether each epoch has a new order. Pass False to evaluate or predict.
            `"global"`: one order of all samples, independent of the number of ranks; every rank
            reads samples of all files. Defaults to True.
        seed: integer that, with the rank and the epoch, determines the order. Defaults to 0.
        remainder: `"uneven"`, `"pad"` or `"drop"`, as for files in `shard`. Defaults to `"uneven"`.
        steps: number of batches per epoch on each rank. Defaults to all.
        unreadable: `"raise"` an error that names file and rank, or `"skip"`: files that a rank
            cannot read when the data set is created are skipped on all ranks, with a message on
            rank 0; samples that `decode` fails on are replaced by other samples of the batch, with
            a message on their rank. Defaults to `"raise"`.

    Returns:
        A `tf.data.Dataset` with the TensorFlow backend, otherwise a `keras.utils.PyDataset`.

    Raises:
        DataError: a file is missing, damaged or compressed, a sample has two members of one field
            or cannot be decoded, or there are too few samples.
        ArgumentError: an argument has an invalid value.
        ArgumentTypeError: an argument has the wrong type.
        MismatchError: files or arguments differ across ranks.

    Example:
    ```python
    import io
    from PIL import Image

    def decode(sample):
        image = Image.open(io.BytesIO(sample["jpg"])).convert("RGB").resize((224, 224))
        return np.asarray(image, "float32"), np.int32(sample["cls"])

    train = keras_dist.data.tar("train/*.tar", decode, batch_size=64)
    ```
    """

    def make_source() -> ShardSource:
        options = ShardOptions(batch_size, shuffle, seed, remainder, steps)
        if not callable(decode):
            raise wrong_kind("decode to be a function of a sample", decode)
        paths = expanded(files)
        kind = TarFiles(decode, unreadable)
        return ShardSource(kind, paths, options, unreadable, facts_of_files(paths))

    return consistency.prepare(make_source)


class TarFiles:
    """Tar files of samples."""

    def __init__(self, decode: Decode, unreadable: Unreadable):
        self._decode, self._unreadable = decode, unreadable

    def look(self, path: str) -> Found:
        """Reads the headers of the members and decodes the first decodable sample."""
        samples = samples_of(path)
        failure: Exception = ValueError("the file has no samples, such as 7.jpg")
        for sample in samples:
            try:
                decoded = self._decode(bytes_of(path, sample))
            except Exception as error:
                failure = error
                if self._unreadable == "raise":
                    break
            else:
                return found_of(len(samples), decoded)
        raise failure

    def reader(self, locations: Sequence[Location], found: Found) -> Read:
        paths = [location.path for location in locations]
        # Cached while other files of the same shuffle window are read.
        samples = functools.lru_cache(MIXED)(lambda shard: samples_of(paths[shard]))

        def decode(key: tuple[str, Sample]) -> Any:
            return self._decode(bytes_of(*key))

        decoder = Decoder(decode, lambda key: f"sample {key[1].key} in {key[0]}", self._unreadable)

        def read(shards: np.ndarray, rows: np.ndarray) -> Any:
            wanted = zip(shards.tolist(), rows.tolist(), strict=True)
            return decoder.batch([(paths[shard], samples(shard)[row]) for shard, row in wanted])

        return read


def samples_of(path: str) -> list[Sample]:
    """Returns the samples of a tar file, in order."""
    samples: list[tuple[str, dict[str, tuple[str, int, int]]]] = []
    end = 0
    with tarfile.open(path, "r:") as archive:
        for member in archive:
            end = member.offset_data + -(-member.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
            found = NAME.match(member.name)
            if not found or not member.isfile() or META.match(member.name):
                continue
            key, field = found[1], found[2].lower()
            if not samples or samples[-1][0] != key:
                samples.append((key, {}))
            fields = samples[-1][1]
            if field in fields or field == KEY:
                raise ValueError(f"{member.name} is a second field {field!r} of sample {key}")
            fields[field] = (field, member.offset_data, member.size)
    # tarfile does not notice a truncation between two members.
    if os.path.getsize(path) < end + tarfile.BLOCKSIZE:
        raise tarfile.ReadError("the file is truncated, or not a tar file")
    return [Sample(key, tuple(fields.values())) for key, fields in samples]


def bytes_of(path: str, sample: Sample) -> dict[str, bytes]:
    """Returns the contents of the members by field, and the name under `"__key__"`."""
    with open(path, "rb") as file:
        members = {KEY: os.fsencode(sample.key)}
        for field, offset, count in sample.members:
            file.seek(offset)
            members[field] = file.read(count)
    return members
