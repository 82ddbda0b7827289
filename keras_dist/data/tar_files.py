"""Tar files of samples in the format of WebDataset, read without extraction."""

import functools
import os
import tarfile
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from keras_dist.data import consistency
from keras_dist.data.cached_shards import MIXED
from keras_dist.data.decoding import Decoder, found_of
from keras_dist.data.file_index import Found, Unreadable
from keras_dist.data.files import facts_of_files
from keras_dist.data.order import Shuffle
from keras_dist.data.partition import Remainder
from keras_dist.data.paths import Paths, expanded
from keras_dist.data.shard_options import ShardOptions
from keras_dist.data.shard_source import Location, ShardSource

__all__ = ["Sample", "TarFiles", "TarReader", "bytes_of", "samples_of", "tar"]

Decode = Callable[[dict[str, bytes]], Any]


class Sample(NamedTuple):
    """A sample in a tar file.

    Args:
        key: name of the sample.
        members: extension, offset and size in bytes of each member.
    """

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
    """Generates the batches of this rank from samples in tar files, for `fit`.

    A sample consists of the members of one basename, as in WebDataset: `n01/7.jpg` and `n01/7.cls`
    are one sample. Members are read from the archive; no path in it is ever written to.

    File i belongs to rank `i % size`. With fewer files than ranks every rank reads all files, and
    sample i belongs to rank `i % size`. In every epoch the order of the files is shuffled, then the
    samples of each four consecutive files.

    Collective: every rank, with the same arguments; blocks until one rank has inspected each file.
    An error on one rank is raised on all.

    Args:
        files: a path, a pattern such as `"train/*.tar"`, or a list of them; not compressed.
        decode: function from a sample to nested tuples and dicts of arrays, always of the same
            shapes. The sample is a dict of bytes by extension, the part after the first dot, such
            as `{"jpg": ..., "cls": b"3"}`; `sample["__key__"]` is its name, as bytes. Called in
            several threads.
        batch_size: largest number of samples of this rank in a step: ranks with fewer samples than
            others distribute them over the same number of steps. Defaults to 32.
        shuffle: whether to shuffle in every epoch. Pass `False` to evaluate or predict.
            `"global"`: one order of all data, which does not depend on the number of ranks; every
            rank reads its samples from all files. Defaults to `True`.
        seed: integer seed of the orders, combined with the rank and the epoch. Defaults to 0.
        remainder: `"uneven"`, `"pad"` or `"drop"`, as for files in `shard`. Defaults to `"uneven"`.
        steps: number of batches in an epoch of each rank, to end it early. Defaults to all.
        unreadable: `"raise"` an error that names file and rank, or `"skip"`: files that a rank
            cannot read when the data set is made are skipped on all ranks, and rank 0 logs them;
            samples for which `decode` fails are replaced by others of their batch, and their rank
            logs them. Defaults to `"raise"`.

    Returns:
        `tf.data.Dataset` on the TensorFlow backend, `keras.utils.PyDataset` on others.

    Raises:
        DataError: a file is missing, damaged or compressed, a sample cannot be decoded, or there
            are too few.
        ArgumentError: an argument has an invalid value.
        ArgumentTypeError: an argument is of the wrong type.
        MismatchError: the ranks have different files or arguments.

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

    def survey() -> ShardSource:
        terms = ShardOptions(batch_size, shuffle, seed, remainder, steps)
        if not callable(decode):
            raise terms.wrong_kind("decode to be a function of a sample", decode)
        paths = expanded(files, terms)
        kind = TarFiles(decode, unreadable)
        return ShardSource(kind, paths, terms, unreadable, facts_of_files(paths))

    return consistency.prepare(survey)


class TarFiles:
    """Tar files of samples.

    Args:
        decode: makes a sample from the bytes of its members.
        unreadable: what to do with samples for which it fails.
    """

    mixed = MIXED

    def __init__(self, decode: Decode, unreadable: Unreadable):
        self._decode, self._unreadable = decode, unreadable

    def look(self, path: str) -> Found:
        """Reads the headers of the members, and decodes the first sample for which it succeeds."""
        samples = samples_of(path)
        failure: Exception = ValueError("there is no sample in it")
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

    def reader(self, places: Sequence[Location], found: Found) -> "TarReader":
        """Returns a reader of the samples."""
        return TarReader([place.path for place in places], self._decode, self._unreadable, found)


class TarReader:
    """Samples in tar files.

    Args:
        paths: the files; a file is a piece.
        decode: makes a sample from the bytes of its members.
        unreadable: what to do with samples for which it fails.
        found: layout of all files.
    """

    def __init__(self, paths: Sequence[str], decode: Decode, unreadable: Unreadable, found: Found):
        self.example = found.example
        self._paths, self._decode = paths, decode
        # The index of a file is kept while files of the same window are read.
        self._samples = functools.lru_cache(MIXED)(lambda piece: samples_of(paths[piece]))
        self._decoder = Decoder(self._sample, self._name, unreadable)

    def read(self, pieces: np.ndarray, rows: np.ndarray) -> Any:
        """Returns the samples, decoded."""
        wanted = zip(pieces.tolist(), rows.tolist(), strict=True)
        return self._decoder.batch([(p, self._samples(p)[row]) for p, row in wanted])

    def _sample(self, place: tuple[int, Sample]) -> Any:
        piece, sample = place
        return self._decode(bytes_of(self._paths[piece], sample))

    def _name(self, place: tuple[int, Sample]) -> str:
        return f"sample {place[1].key} in {self._paths[place[0]]}"


def samples_of(path: str) -> list[Sample]:
    """Returns the samples of a tar file, in their order.

    Raises:
        tarfile.TarError: the file is damaged, truncated or compressed.
    """
    members: dict[str, list[tuple[str, int, int]]] = {}
    end = 0
    with tarfile.open(path, "r:") as archive:
        for member in archive:
            end = member.offset_data + -(-member.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
            if member.isfile():
                folder, _, name = member.name.rpartition("/")
                base, _, extension = name.partition(".")
                entry = (extension, member.offset_data, member.size)
                members.setdefault(f"{folder}/{base}".lstrip("/"), []).append(entry)
    # tarfile does not notice a cut between two members.
    if os.path.getsize(path) < end + tarfile.BLOCKSIZE:
        raise tarfile.ReadError("it is truncated, or not a tar file")
    return [Sample(key, tuple(entries)) for key, entries in members.items()]


def bytes_of(path: str, sample: Sample) -> dict[str, bytes]:
    """Returns the members of a sample by extension, and its name."""
    with open(path, "rb") as file:
        members = {"__key__": sample.key.encode()}
        for extension, offset, count in sample.members:
            file.seek(offset)
            members[extension] = file.read(count)
    return members
