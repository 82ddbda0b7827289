"""Images in files, with a class or a value for each, read by Pillow: an image is a piece."""

import hashlib
import os
from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np

from keras_dist import errors
from keras_dist.data import consistency
from keras_dist.data.decoding import Decoder, found_of
from keras_dist.data.file_index import Found, Unreadable
from keras_dist.data.files import facts_of_names
from keras_dist.data.image_labels import Classes, Images, LabelMode, labels_of, listed
from keras_dist.data.order import Shuffle
from keras_dist.data.partition import Remainder
from keras_dist.data.shard_options import Fact, ShardOptions
from keras_dist.data.shard_source import Location, ShardSource

__all__ = ["ColorMode", "ImageFiles", "ImageReader", "image_dataset"]

ColorMode = Literal["rgb", "rgba", "grayscale"]
PILLOW_MODE = {"rgb": "RGB", "rgba": "RGBA", "grayscale": "L"}


def image_dataset(
    images: Any,
    image_size: tuple[int, int] = (256, 256),
    batch_size: int = 32,
    *,
    label_mode: LabelMode | None = "int",
    class_names: Sequence[str] | None = None,
    color_mode: ColorMode = "rgb",
    directory: str | os.PathLike[str] | None = None,
    x_col: str = "filename",
    y_col: str | Sequence[str] = "class",
    own: bool = False,
    shuffle: Shuffle = True,
    seed: int = 0,
    remainder: Remainder = "uneven",
    steps: int | None = None,
    unreadable: Unreadable = "raise",
) -> Any:
    """Returns this rank's part of a tree or table of images, in batches, ready for `fit`.

    Image i belongs to rank `i % size`. Classes are numbered in sorted order, the same on all ranks;
    the data set's `class_names` tells them. Needs Pillow: `pip install 'keras_dist[images]'`.

    Collective: every rank, with the same arguments; blocks, until each image has been looked into
    by one rank. An error on one rank is raised on all.

    Args:
        images: a directory with a directory for each class; or a pandas `DataFrame`.
        image_size: height and width to which images are resized, in pixels. Defaults to
            `(256, 256)`.
        batch_size: images in each step on this rank, at most. Defaults to 32.
        label_mode: `"int"`: int32, the number of the class. `"categorical"`: float32, 1 at that
            number. `"binary"`: float32 of shape `(1,)`, of two classes. `"raw"`: the values in
            `y_col`, as float32. `None`: images alone, of a directory all that are in it. Defaults
            to `"int"`.
        class_names: the classes in the order of their numbers. Defaults to those that are there,
            sorted; of a `DataFrame`, as text.
        color_mode: `"rgb"`, `"rgba"` or `"grayscale"`. Defaults to `"rgb"`.
        directory: where the files of a `DataFrame` lie. Defaults to the working directory.
        x_col: the column with paths. Defaults to `"filename"`.
        y_col: the column with classes, or with `label_mode="raw"` one or several with numbers.
            Defaults to `"class"`.
        own: whether each rank is given images of its own, other ones than the rest, as on disks of
            nodes. Classes are then those of all ranks. Defaults to False: all see all images.
        shuffle: whether every epoch has an order of its own. Defaults to True. Pass False to
            evaluate or predict. `"global"`: one order of the whole that does not depend on the
            number of ranks; not with `own`.
        seed: whole number from which, with rank and epoch, the orders follow. Defaults to 0.
        remainder: `"uneven"`, `"pad"` or `"drop"`, as for files in `shard`. Defaults to `"uneven"`.
        steps: batches in an epoch of each rank, where it is to end early. Defaults to all.
        unreadable: `"raise"` an error that names file and rank, or `"skip"`: images that are
            missing, or whose header cannot be read, are left out, which the root says; those
            that turn out to be damaged later are replaced by others of their batch, which their
            rank says. Defaults to `"raise"`.

    Returns:
        Batches of images, float32 from 0 to 255 of shape `(batch, height, width, channels)`, and
        labels: `tf.data.Dataset` with Keras on TensorFlow, else `keras.utils.PyDataset`.

    Raises:
        DataError: an image cannot be read, there are fewer than ranks, or a class is not named.
        ArgumentError: an argument has an impossible value.
        ArgumentTypeError: an argument is of the wrong kind.
        MismatchError: the ranks have different images, classes or arguments.

    Example:
    ```python
    train = keras_dist.data.image_dataset("train", image_size=(224, 224), batch_size=64)
    print(train.class_names)
    ```
    """

    def look() -> Classes:
        terms = ShardOptions(batch_size, shuffle, seed, remainder, steps)
        found = listed(images, directory, x_col, y_col, label_mode, terms)
        return Classes(found, label_mode, class_names, own, terms)

    found, classes = consistency.prepare(look)

    def survey() -> ShardSource:
        terms = ShardOptions(batch_size, shuffle, seed, remainder, steps)
        labels = labels_of(found, classes, label_mode)
        kind = ImageFiles(found, labels, image_size, color_mode, unreadable, terms)
        facts = [Fact("image_size", tuple(image_size)), Fact("color_mode", color_mode)]
        if not own:
            facts += facts_of_names(found.names)
            facts.append(Fact("the labels", labels is not None and _digest(labels)))
        # Where a rank looks into its own images, it need not reach those of others.
        return ShardSource(kind, found.paths, terms, unreadable, facts, own, visible=False)

    part = consistency.prepare(survey)
    part.class_names = classes
    return part


class ImageFiles:
    """Files with an image each.

    Args:
        images: all of them.
        labels: their labels, if they have some.
        image_size: height and width.
        color_mode: what a pixel consists of.
        unreadable: what becomes of images that cannot be decoded.
        terms: for messages.

    Raises:
        ArgumentError: there is no such size or mode.
    """

    mixed = 1 << 62

    def __init__(
        self,
        images: Images,
        labels: np.ndarray | None,
        image_size: tuple[int, int],
        color_mode: ColorMode,
        unreadable: Unreadable,
        terms: ShardOptions,
    ):
        for holds, expected, received in (
            (
                len(image_size) == 2 and all(type(n) is int and n > 0 for n in image_size),
                "image_size to be height and width in pixels",
                image_size,
            ),
            (
                color_mode in get_args(ColorMode),
                f"color_mode to be one of {', '.join(map(repr, get_args(ColorMode)))}",
                color_mode,
            ),
        ):
            if not holds:
                remedy = "See image_dataset()."
                raise errors.ArgumentError(terms.explain(expected, repr(received), remedy))
        self._size, self._mode = image_size, PILLOW_MODE[color_mode]
        self._unreadable = unreadable
        self._labels = labels
        channels = {"RGB": 3, "RGBA": 4, "L": 1}[self._mode]
        image = np.empty((*image_size, channels), "float32")
        self._found = found_of(1, image if labels is None else (image, labels[0]))

    def look(self, path: str) -> Found:
        """Reads the header of an image."""
        from PIL import Image

        with Image.open(path):
            return self._found  # the same for all: a million of them travel as one

    def reader(self, places: Sequence[Location], found: Found) -> "ImageReader":
        """Returns what decodes the images."""
        return ImageReader(places, self._decode, found, self._unreadable)

    def _decode(self, place: Location) -> Any:
        from PIL import Image

        height, width = self._size
        with Image.open(place.path) as image:
            image.draft(self._mode, (width, height))  # JPEG alone: not more pixels than needed
            pixels = image.convert(self._mode).resize((width, height), Image.Resampling.BILINEAR)
        array = np.asarray(pixels, "float32").reshape(height, width, -1)
        return array if self._labels is None else (array, self._labels[place.file])


class ImageReader:
    """Images, decoded when they are asked for.

    Args:
        places: where they lie.
        decode: makes an image, with its label, of a place.
        found: what all of them are like.
        unreadable: what becomes of images that cannot be decoded.
    """

    def __init__(
        self, places: Sequence[Location], decode: Any, found: Found, unreadable: Unreadable
    ):
        self.example = found.example
        self._places = places
        self._decoder = Decoder(decode, lambda place: place.path, unreadable)

    def read(self, pieces: np.ndarray, rows: np.ndarray) -> Any:
        """Returns the images, decoded."""
        return self._decoder.batch([self._places[piece] for piece in pieces.tolist()])


def _digest(labels: np.ndarray) -> str:
    return hashlib.blake2b(np.ascontiguousarray(labels).data, digest_size=6).hexdigest()
