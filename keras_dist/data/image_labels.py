"""Lists of images from a directory or a DataFrame, their classes and their labels."""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from keras_dist import errors
from keras_dist.data.shard_options import Fact, ShardOptions

LabelMode = Literal["int", "categorical", "binary", "raw"]
SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"}
SAME = (
    "Copy the same images to all nodes. If each rank reads different images, pass own=True, which "
    "combines the classes of all ranks."
)


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
        options: ShardOptions,
    ):
        found = sorted(set(images.targets)) if mode not in (None, "raw") else []
        unknown = set(found) - set(class_names if class_names is not None else found)
        if unknown:
            raise errors.DataError(
                options.where,
                f"images of the classes {list(class_names or ())}",
                f"images of class {sorted(unknown)[0]!r}",
                "Add the class to class_names, or remove these images.",
            )
        self._images, self._named, self._mode, self._options = images, class_names, mode, options
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
            raise errors.DataError(
                self._options.where, "two classes for label_mode='binary'", f"{classes}", remedy
            )
        return self._images, classes


def listed(
    images: Any,
    directory: str | os.PathLike[str] | None,
    x_col: str,
    y_col: str | Sequence[str],
    mode: LabelMode | None,
    options: ShardOptions,
) -> Images:
    """Lists the images of a directory or of a DataFrame."""
    if mode not in (None, *get_args(LabelMode)):
        choices = ", ".join(map(repr, (*get_args(LabelMode), None)))
        expected, remedy = f"label_mode to be one of {choices}", "See image_dataset()."
        raise errors.ArgumentError(options.where, expected, repr(mode), remedy)
    if isinstance(images, str | os.PathLike):
        found = _of_directory(Path(images), mode, options)
    elif hasattr(images, "columns"):
        found = _of_frame(images, Path(directory or ""), x_col, y_col, mode, options)
    else:
        raise options.wrong_kind("a directory or a DataFrame", images)
    if not found.paths:
        raise errors.DataError(options.where, f"images in {images!s:.200}", "none", SAME)
    return found


def _of_directory(directory: Path, mode: LabelMode | None, options: ShardOptions) -> Images:
    if mode == "raw":
        remedy = "Pass a DataFrame with a value for each image."
        raise errors.ArgumentError(
            options.where, "no label_mode='raw' for a directory", "'raw'", remedy
        )
    if not directory.is_dir():
        raise errors.DataError(options.where, f"a directory {directory}", "none", SAME)
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
    options: ShardOptions,
) -> Images:
    wanted = [y_col] if isinstance(y_col, str) else list(y_col)
    for column in [x_col, *(wanted if mode is not None else ())]:
        if column not in frame.columns:
            known = ", ".join(map(str, frame.columns))
            remedy = "Pass x_col and y_col."
            raise errors.DataError(options.where, f"a column {column!r}", known, remedy)
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
