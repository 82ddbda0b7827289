"""Image files with labels, read by Pillow: each image is a shard."""

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
from keras_dist.data.image_labels import Classes, LabelMode, labels_of, listed
from keras_dist.data.order import Shuffle
from keras_dist.data.partition import Remainder
from keras_dist.data.shard_options import Fact, ShardOptions
from keras_dist.data.shard_source import Location, ShardSource

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
    """Returns this rank's batches of images in a directory or a `DataFrame`, for `fit`.

    Image i belongs to rank `i % size`. Classes are numbered in sorted order, equally on all ranks;
    the attribute `class_names` of the data set lists them. Requires Pillow:
    `pip install 'keras_dist[images]'`.

    Collective: every rank must call it with the same arguments. Blocks until each image has been
    inspected by one rank. An error on one rank is raised on all ranks.

    Args:
        images: a directory with one subdirectory per class, or a pandas `DataFrame`.
        image_size: height and width in pixels to which images are resized. Defaults to
            `(256, 256)`.
        batch_size: maximum number of images per step on this rank. Defaults to 32.
        label_mode: form of the labels. `"int"`: class numbers, int32 of shape `(batch,)`.
            `"categorical"`: one-hot, float32 of shape `(batch, classes)`. `"binary"`: 0 or 1,
            float32 of shape `(batch, 1)`, for two classes. `"raw"`: the values in `y_col`, float32
            of shape `(batch, columns)`. `None`: no labels; a directory then needs no
            subdirectories. Defaults to `"int"`.
        class_names: the classes in the order of their numbers. Defaults to the classes found,
            sorted; the values of a `DataFrame` are converted to strings.
        color_mode: `"rgb"`, `"rgba"` or `"grayscale"`. Of 16 bits per channel the upper 8 are used,
            as in `keras.utils.image_dataset_from_directory`. Defaults to `"rgb"`.
        directory: directory to which paths in a `DataFrame` are relative. Defaults to the working
            directory.
        x_col: name of the column of paths. Defaults to `"filename"`.
        y_col: name of the column of classes; with `label_mode="raw"`, the name or names of columns
            of numbers. Defaults to `"class"`.
        own: whether each rank passes different images, such as images on the disk of its node.
            The classes of all ranks are then combined. Defaults to False: every rank passes all
            images.
        shuffle: whether each epoch has a new order. Pass False to evaluate or predict.
            `"global"`: one order of all samples, independent of the number of ranks; not with
            `own`. Defaults to True.
        seed: integer that, with the rank and the epoch, determines the order. Defaults to 0.
        remainder: `"uneven"`, `"pad"` or `"drop"`, as for files in `shard`. Defaults to `"uneven"`.
        steps: number of batches per epoch on each rank. Defaults to all.
        unreadable: `"raise"` an error that names file and rank, or `"skip"`: images that are
            missing, or whose header cannot be read, are skipped, with a message on rank 0; images
            that fail to decode later are replaced by other images of the batch, with a message on
            their rank. Defaults to `"raise"`.

    Returns:
        Batches of images, float32 from 0 to 255 of shape `(batch, height, width, channels)`, and
        labels: a `tf.data.Dataset` with the TensorFlow backend, otherwise a
        `keras.utils.PyDataset`.

    Raises:
        DataError: an image cannot be read, there are fewer images than ranks, or `class_names`
            lacks a class.
        ArgumentError: an argument has an invalid value.
        ArgumentTypeError: an argument has the wrong type.
        MismatchError: images, classes or arguments differ across ranks.

    Example:
    ```python
    train = keras_dist.data.image_dataset("train", image_size=(224, 224), batch_size=64)
    print(train.class_names)
    ```
    """

    def make_classes() -> Classes:
        options = ShardOptions(batch_size, shuffle, seed, remainder, steps)
        found = listed(images, directory, x_col, y_col, label_mode, options)
        return Classes(found, label_mode, class_names, own, options)

    found, classes = consistency.prepare(make_classes)

    def make_source() -> ShardSource:
        options = ShardOptions(batch_size, shuffle, seed, remainder, steps)
        labels = labels_of(found, classes, label_mode)
        files = ImageFiles(labels, image_size, color_mode, unreadable, options)
        facts = [Fact("image_size", tuple(image_size)), Fact("color_mode", color_mode)]
        if not own:
            facts += facts_of_names(found.names)
            facts.append(Fact("the labels", labels is not None and _digest(labels)))
        # A rank only needs access to the images that it inspects.
        return ShardSource(files, found.paths, options, unreadable, facts, own, visible=False)

    dataset = consistency.prepare(make_source)
    dataset.class_names = classes
    return dataset


class ImageFiles:
    """Image files."""

    mixed = 1 << 62  # all images are shuffled together

    def __init__(
        self,
        labels: np.ndarray | None,
        image_size: tuple[int, int],
        color_mode: ColorMode,
        unreadable: Unreadable,
        options: ShardOptions,
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
                raise errors.ArgumentError(options.where, expected, repr(received), remedy)
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
            return self._found  # one object for all images, which pickle sends once

    def reader(self, locations: Sequence[Location], found: Found) -> "ImageReader":
        """Returns the reader of the images."""
        return ImageReader(locations, self._decode, found, self._unreadable)

    def _decode(self, location: Location) -> Any:
        from PIL import Image

        height, width = self._size
        with Image.open(location.path) as image:
            image.draft(self._mode, (width, height))  # decodes a JPEG at a reduced size
            converted = _eight_bits(image).convert(self._mode)
        pixels = converted.resize((width, height), Image.Resampling.BILINEAR)
        array = np.asarray(pixels, "float32").reshape(height, width, -1)
        return array if self._labels is None else (array, self._labels[location.file])


class ImageReader:
    """Decodes images."""

    def __init__(
        self, locations: Sequence[Location], decode: Any, found: Found, unreadable: Unreadable
    ):
        self.example = found.example
        self._locations = locations
        self._decoder = Decoder(decode, lambda location: location.path, unreadable)

    def read(self, shards: np.ndarray, rows: np.ndarray) -> Any:
        """Returns a batch of decoded images."""
        return self._decoder.batch([self._locations[shard] for shard in shards.tolist()])


def _eight_bits(image: Any) -> Any:
    """Returns the upper 8 bits of a grey image of 16 bits, as Keras does, where Pillow cuts off."""
    from PIL import Image

    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    return image


def _digest(labels: np.ndarray) -> str:
    return hashlib.blake2b(np.ascontiguousarray(labels).data, digest_size=6).hexdigest()
