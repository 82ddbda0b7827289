"""Image files with labels, read by Pillow; an image is a piece."""

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
    """Generates the batches of this rank from image files, for `fit`.

    Image i belongs to rank `i % size`. Classes are numbered in sorted order, the same on all ranks;
    the data set has them as `class_names`. Needs Pillow: `pip install 'keras_dist[images]'`.

    Collective: every rank, with the same arguments; blocks until one rank has inspected each
    image. An error on one rank is raised on all.

    Args:
        images: a directory with a subdirectory for each class, or a pandas `DataFrame`.
        image_size: height and width to which images are resized, in pixels. Defaults to
            `(256, 256)`.
        batch_size: largest number of images of this rank in a step. Defaults to 32.
        label_mode: `"int"`: int32, the number of the class. `"categorical"`: float32, one-hot.
            `"binary"`: float32 of shape `(1,)`, for two classes. `"raw"`: the values in `y_col`, as
            float32. `None`: no labels; of a directory, all images in it. Defaults to `"int"`.
        class_names: the classes in the order of their numbers. Defaults to the classes of the
            images, sorted; those of a `DataFrame` as text.
        color_mode: `"rgb"`, `"rgba"` or `"grayscale"`. Defaults to `"rgb"`.
        directory: directory of the files of a `DataFrame`. Defaults to the working directory.
        x_col: column of paths. Defaults to `"filename"`.
        y_col: column of classes; with `label_mode="raw"` one or several columns of numbers.
            Defaults to `"class"`.
        own: whether `images` differs on each rank, as on local disks; the classes are those of all
            ranks. Defaults to `False`: `images` is the same on all ranks.
        shuffle: whether to shuffle in every epoch. Pass `False` to evaluate or predict.
            `"global"`: one order of all images, which does not depend on the number of ranks; not
            with `own`. Defaults to `True`.
        seed: integer seed of the orders, combined with the rank and the epoch. Defaults to 0.
        remainder: `"uneven"`, `"pad"` or `"drop"`, as for files in `shard`. Defaults to `"uneven"`.
        steps: number of batches in an epoch of each rank, to end it early. Defaults to all.
        unreadable: `"raise"` an error that names file and rank, or `"skip"`: images that are
            missing, or whose header cannot be read, are skipped, and rank 0 logs them; images whose
            damage is found later are replaced by others of their batch, and their rank logs them.
            Defaults to `"raise"`.

    Returns:
        Batches of images, float32 from 0 to 255 of shape `(batch, height, width, channels)`, and of
        labels: `tf.data.Dataset` on the TensorFlow backend, `keras.utils.PyDataset` on others.

    Raises:
        DataError: an image cannot be read, there are fewer images than ranks, or a class is not in
            `class_names`.
        ArgumentError: an argument has an invalid value.
        ArgumentTypeError: an argument is of the wrong type.
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
        # A rank inspects its own images, and need not reach those of others.
        return ShardSource(kind, found.paths, terms, unreadable, facts, own, visible=False)

    part = consistency.prepare(survey)
    part.class_names = classes
    return part


class ImageFiles:
    """Image files.

    Args:
        images: the images.
        labels: their labels, if any.
        image_size: height and width in pixels.
        color_mode: channels of a pixel.
        unreadable: what to do with images that cannot be decoded.
        terms: options of the data set, for messages.

    Raises:
        ArgumentError: the size or the mode is invalid.
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
            return self._found  # one object for all images: it is pickled once

    def reader(self, places: Sequence[Location], found: Found) -> "ImageReader":
        """Returns a reader of the images."""
        return ImageReader(places, self._decode, found, self._unreadable)

    def _decode(self, place: Location) -> Any:
        from PIL import Image

        height, width = self._size
        with Image.open(place.path) as image:
            image.draft(self._mode, (width, height))  # JPEG: decodes no more pixels than needed
            pixels = image.convert(self._mode).resize((width, height), Image.Resampling.BILINEAR)
        array = np.asarray(pixels, "float32").reshape(height, width, -1)
        return array if self._labels is None else (array, self._labels[place.file])


class ImageReader:
    """Images, decoded when they are read.

    Args:
        places: locations of the images.
        decode: makes an image, with its label, from a location.
        found: layout of all images.
        unreadable: what to do with images that cannot be decoded.
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
