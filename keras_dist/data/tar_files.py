"""Tar files of samples, as WebDataset writes them; nothing is ever extracted."""

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
    """Where a sample lies in its file.

    Args:
        key: its name.
        members: extension, offset and bytes of each.
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
    """Returns this rank's part of the samples in tar files, in batches, ready for `fit`.

    A sample is made of the members of one basename, as WebDataset has it: `n01/7.jpg` and
    `n01/7.cls` are one. Members are read where they lie; no path of an archive is ever written to.

    File i belongs to rank `i % size`; with fewer files than ranks all read all files, and sample i
    belongs to rank `i % size`. Shuffling puts files in another order every epoch, and samples of
    four files that follow each other are mixed.

    Collective: every rank, with the same arguments; blocks, until each file has been looked into
    by one rank. An error on one rank is raised on all.

    Args:
        files: a path, a pattern such as `"train/*.tar"`, or a list of them; not compressed.
        decode: function from a sample to nested tuples and dicts of arrays, always of the same
            shapes. The sample is a dict of bytes by extension, as in `{"jpg": ..., "cls": b"3"}`,
            what follows the first dot; `sample["__key__"]` is its name, as bytes. Called by several
            threads.
        batch_size: samples in each step on this rank, at most: ranks that hold fewer than others
            spread theirs over as many steps. Defaults to 32.
        shuffle: whether every epoch has an order of its own. Defaults to True. Pass False to
            evaluate or predict. `"global"`: one order of the whole that does not depend on the
            number of ranks, for which every rank reads its samples of all files.
        seed: whole number from which, with rank and epoch, the orders follow. Defaults to 0.
        remainder: `"uneven"`, `"pad"` or `"drop"`, as for files in `shard`. Defaults to `"uneven"`.
        steps: batches in an epoch of each rank, where it is to end early. Defaults to all.
        unreadable: `"raise"` an error that names file and rank, or `"skip"`: files that some rank
            cannot read when the data set is made are left out on all ranks, which the root says;
            in place of samples that `decode` fails on come others of their batch, which their rank
            says. Defaults to `"raise"`.

    Returns:
        `tf.data.Dataset` with Keras on TensorFlow, else `keras.utils.PyDataset`.

    Raises:
        DataError: a file is missing, damaged or compressed, a sample cannot be decoded, or there
            are too few.
        ArgumentError: an argument has an impossible value.
        ArgumentTypeError: an argument is of the wrong kind.
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
        decode: makes a sample of the bytes of its members.
        unreadable: what becomes of samples that it fails on.
    """

    mixed = MIXED

    def __init__(self, decode: Decode, unreadable: Unreadable):
        self._decode, self._unreadable = decode, unreadable

    def look(self, path: str) -> Found:
        """Reads the headers of the members, and decodes the first sample that can be."""
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
        """Returns what reads the samples."""
        return TarReader([place.path for place in places], self._decode, self._unreadable, found)


class TarReader:
    """Samples in tar files.

    Args:
        paths: the files, one a piece.
        decode: makes a sample of the bytes of its members.
        unreadable: what becomes of samples that it fails on.
        found: what is known of all files.
    """

    def __init__(self, paths: Sequence[str], decode: Decode, unreadable: Unreadable, found: Found):
        self.example = found.example
        self._paths, self._decode = paths, decode
        # What stands in a file is known as long as others of the same window are read.
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
    """Returns what samples stand in a tar file, in their order.

    Raises:
        tarfile.TarError: it is damaged, cut off or compressed.
    """
    members: dict[str, list[tuple[str, int, int]]] = {}
    end = 0
    with tarfile.open(path, "r:") as archive:
        for member in archive:
            end = member.offset_data + -(-member.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
            if member.isfile():
                folder, _, name = member.name.rpartition("/")
                base, _, extension = name.partition(".")
                place = (extension, member.offset_data, member.size)
                members.setdefault(f"{folder}/{base}".lstrip("/"), []).append(place)
    # A cut between two members goes unnoticed by tarfile.
    if os.path.getsize(path) < end + tarfile.BLOCKSIZE:
        raise tarfile.ReadError("it has been cut off, or is no tar file")
    return [Sample(key, tuple(places)) for key, places in members.items()]


def bytes_of(path: str, sample: Sample) -> dict[str, bytes]:
    """Returns the members of a sample by extension, and its name."""
    with open(path, "rb") as file:
        members = {"__key__": sample.key.encode()}
        for extension, offset, count in sample.members:
            file.seek(offset)
            members[extension] = file.read(count)
    return members
