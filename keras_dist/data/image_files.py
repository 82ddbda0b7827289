"""Image files with labels, read by Pillow: each image is a shard."""

import dataclasses
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from keras_dist import errors
from keras_dist.data import consistency
from keras_dist.data.files import Found, Unreadable, facts_of_names
from keras_dist.data.partition import Remainder, Shuffle
from keras_dist.data.shard_options import Fact, ShardOptions, check_choice, wrong_kind
from keras_dist.data.shard_source import Decoder, Location, Read, ShardSource, found_of

LabelMode = Literal["int", "categorical", "binary", "raw"]
ColorMode = Literal["rgb", "rgba", "grayscale"]
PILLOW_MODE = {"rgb": "RGB", "rgba": "RGBA", "grayscale": "L"}
ALL = 1 << 62  # images that are shuffled together
SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"}
SAME = (
    "Copy the same images to all nodes. If each rank reads different images, pass own=True, which "
    "combines the classes of all ranks."
)


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
        found = listed(images, directory, x_col, y_col, label_mode)
        return Classes(found, label_mode, class_names, own)

    found, classes = consistency.prepare(make_classes)

    def make_source() -> ShardSource:
        options = ShardOptions(batch_size, shuffle, seed, remainder, steps)
        labels = labels_of(found, classes, label_mode)
        files = ImageFiles(labels, image_size, color_mode, unreadable)
        facts = [Fact("image_size", tuple(image_size)), Fact("color_mode", color_mode)]
        if not own:
            facts += facts_of_names(found.names)
            facts.append(Fact("the labels", labels is not None and _digest(labels)))
        # A rank only needs access to the images that it inspects.
        return ShardSource(
            files, found.paths, options, unreadable, facts, own, visible=False, mixed=ALL
        )

    dataset = consistency.prepare(make_source)
    dataset.class_names = classes
    return dataset


class ImageFiles:
    """Image files."""

    def __init__(
        self,
        labels: np.ndarray | None,
        image_size: tuple[int, int],
        color_mode: ColorMode,
        unreadable: Unreadable,
    ):
        remedy = "See image_dataset()."
        if len(image_size) != 2 or not all(type(n) is int and n > 0 for n in image_size):
            expected = "image_size to be height and width in pixels"
            raise errors.ArgumentError(expected, repr(image_size), remedy)
        check_choice("color_mode", color_mode, get_args(ColorMode), remedy)
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

    def reader(self, locations: Sequence[Location], found: Found) -> Read:
        decoder = Decoder(self._decode, lambda location: location.path, self._unreadable)
        return lambda shards, rows: decoder.batch([locations[each] for each in shards.tolist()])

    def _decode(self, location: Location) -> Any:
        from PIL import Image

        height, width = self._size
        with Image.open(location.path) as image:
            image.draft(self._mode, (width, height))  # decodes a JPEG at a reduced size
            converted = _eight_bits(image).convert(self._mode)
        pixels = converted.resize((width, height), Image.Resampling.BILINEAR)
        array = np.asarray(pixels, "float32").reshape(height, width, -1)
        return array if self._labels is None else (array, self._labels[location.file])


def _eight_bits(image: Any) -> Any:
    """Returns the upper 8 bits of a grey image of 16 bits, as Keras does, where Pillow cuts off."""
    from PIL import Image

    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    return image


def _digest(labels: np.ndarray) -> str:
    return hashlib.blake2b(np.ascontiguousarray(labels).data, digest_size=6).hexdigest()


# --- Lists of images, their classes and labels


@dataclasses.dataclass(frozen=True)
class Images:
    """Images and their targets."""

    paths: list[str]
    names: list[str]
    targets: Any


class Classes:
    """The classes of the images of a rank, to be combined across ranks."""

    def __init__(
        self,
        images: Images,
        mode: LabelMode | None,
        class_names: Sequence[str] | None,
        own: bool,
    ):
        found = sorted(set(images.targets)) if mode not in (None, "raw") else []
        unknown = set(found) - set(class_names if class_names is not None else found)
        if unknown:
            raise errors.DataError(
                f"images of the classes {list(class_names or ())}",
                f"images of class {sorted(unknown)[0]!r}",
                "Add the class to class_names, or remove these images.",
            )
        self._images, self._named, self._mode = images, class_names, mode
        self.held = found
        self.facts = [Fact("label_mode", mode), Fact("own", own)]
        self.facts += [Fact("class_names", class_names and list(class_names))]
        if not own:
            self.facts.append(Fact("the classes of the images", found, SAME))

    def part(self, held: Sequence[list[str]]) -> tuple[Images, list[str]]:
        """Returns the images of this rank, and the classes in order, given `held` of all ranks."""
        classes = sorted(set().union(*held)) if self._named is None else list(self._named)
        if self._mode == "binary" and len(classes) != 2:
            remedy = "Pass label_mode='int' or 'categorical'."
            raise errors.DataError("two classes for label_mode='binary'", f"{classes}", remedy)
        return self._images, classes


def listed(
    images: Any,
    directory: str | os.PathLike[str] | None,
    x_col: str,
    y_col: str | Sequence[str],
    mode: LabelMode | None,
) -> Images:
    """Lists the images of a directory or of a DataFrame."""
    check_choice("label_mode", mode, (*get_args(LabelMode), None), "See image_dataset().")
    if isinstance(images, str | os.PathLike):
        found = _of_directory(Path(images), mode)
    elif hasattr(images, "columns"):
        found = _of_frame(images, Path(directory or ""), x_col, y_col, mode)
    else:
        raise wrong_kind("a directory or a DataFrame", images)
    if not found.paths:
        raise errors.DataError(f"images in {images!s:.200}", "none", SAME)
    return found


def _of_directory(directory: Path, mode: LabelMode | None) -> Images:
    if mode == "raw":
        remedy = "Pass a DataFrame with a value for each image."
        raise errors.ArgumentError("no label_mode='raw' for a directory", "'raw'", remedy)
    if not directory.is_dir():
        raise errors.DataError(f"a directory {directory}", "none", SAME)
    found = sorted(
        os.path.relpath(os.path.join(folder, name), directory)
        for folder, _, names in os.walk(directory, followlinks=True)
        for name in names
        if Path(name).suffix.lower() in SUFFIXES and not name.startswith(".")
    )
    if mode is not None:
        found = [name for name in found if os.sep in name]
    targets = [name.partition(os.sep)[0] for name in found] if mode is not None else None
    return Images([str(directory / name) for name in found], found, targets)


def _of_frame(
    frame: Any,
    directory: Path,
    x_col: str,
    y_col: str | Sequence[str],
    mode: LabelMode | None,
) -> Images:
    wanted = [y_col] if isinstance(y_col, str) else list(y_col)
    for column in [x_col, *(wanted if mode is not None else ())]:
        if column not in frame.columns:
            known = ", ".join(map(str, frame.columns))
            remedy = "Pass x_col and y_col."
            raise errors.DataError(f"a column {column!r}", known, remedy)
    names = [str(name) for name in frame[x_col]]
    targets: Any = None
    if mode == "raw":
        targets = frame[wanted].to_numpy("float32")
    elif mode is not None:
        targets = [str(name) for name in frame[wanted[0]]]
    return Images([str(directory / name) for name in names], names, targets)


def labels_of(images: Images, classes: Sequence[str], mode: LabelMode | None) -> np.ndarray | None:
    """Returns one label per image, in the form of `keras.utils.image_dataset_from_directory`."""
    if mode is None:
        return None
    if mode == "raw":
        return images.targets
    number_of = {name: number for number, name in enumerate(classes)}
    numbers = np.array([number_of[name] for name in images.targets], np.int32)
    if mode == "binary":
        return numbers.astype("float32")[:, None]
    if mode == "categorical":
        return np.eye(len(classes), dtype="float32")[numbers]
    return numbers
