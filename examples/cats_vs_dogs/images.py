"""Finds pictures of cats and dogs: the user's own, the public archive, or drawings."""

import os
from pathlib import Path

import keras
from archive import NAME, unpack
from drawings import draw_files
from once_per_node import fetch, once_per_node
from PIL import Image

import keras_dist

# 25,000 photographs that Microsoft gives to the public, 825 MB.
PUBLIC = (
    "https://download.microsoft.com/download/3/E/1/"
    "3E1C3F21-ECDB-4869-8368-6DEBA77B919F/kagglecatsanddogs_5340.zip"
)
PUBLIC_SHA256 = "b7974bd00a84a99921f36ee4403f089853777b5ae8d151c76a86e64900334af9"
CACHE = Path(os.environ.get("KERAS_HOME", Path.home() / ".keras")) / "datasets" / "cats_vs_dogs"
MAX_PIXELS = 50_000_000


def find_images(data="auto", drawings=3000):
    """Returns the files of all pictures, sorted, and a text that says what they are.

    Collective: every rank must call it.

    Args:
        data: a directory or zip archive with files `cat.N.jpg` and `dog.N.jpg`; `"drawings"`;
            or `"auto"`: the public archive where it can be downloaded, else drawings.
        drawings: how many to draw, where it comes to that.

    Raises:
        ValueError: there are no such pictures, or the archive is not to be trusted.
    """
    if data == "auto" and fetch(_download):
        files, source = _of_archive(_download()), "photographs from Microsoft's archive"
    elif data in ("auto", "drawings"):
        share = slice(keras_dist.local_rank(), None, keras_dist.local_size())
        files, source = draw_files(CACHE / "drawings", drawings, share), "drawings"
        keras_dist.barrier()  # until the ranks of this node have drawn theirs
    elif Path(data).is_dir():
        files, source = _of_directory(Path(data)), f"the pictures in {data}"
    elif Path(data).is_file():
        files, source = _of_archive(Path(data)), f"the pictures in {data}"
    else:
        raise ValueError(f"{data} is no directory and no zip archive on this machine")
    files = sorted(files)
    broken = _broken(files)
    source += f", {len(broken):,} left out that are damaged or no JPEG" if broken else ""
    return [str(file) for i, file in enumerate(files) if i not in broken], source


def category_of(file):
    """Returns `"cat"` or `"dog"`, as the name of a file says."""
    return NAME.search(Path(file).as_posix())[1].lower()


def _download():
    """Returns where the public archive is, downloaded and checked where it is not there yet."""
    return Path(keras.utils.get_file(origin=PUBLIC, file_hash=PUBLIC_SHA256))


def _of_archive(archive):
    state = archive.stat()
    folder = CACHE / f"{archive.stem}-{state.st_size}-{state.st_mtime_ns}"
    once_per_node(lambda: unpack(archive, folder))
    return _of_directory(folder)


def _of_directory(folder):
    files = [file for file in folder.rglob("*") if NAME.search(file.as_posix()) and file.is_file()]
    if not files:
        raise ValueError(f"{folder} holds no files called cat.N.jpg or dog.N.jpg")
    return files


def _broken(files):
    """Returns which files cannot be read, by index; each rank looks at its share."""
    mine = range(keras_dist.rank(), len(files), keras_dist.size())
    broken = [i for i in mine if not _is_readable(files[i])]
    return {i for part in keras_dist.allgather_object(broken) for i in part}


def _is_readable(file):
    try:
        with Image.open(file, formats=["JPEG"]) as image:
            if image.mode not in ("RGB", "L") or image.width * image.height > MAX_PIXELS:
                return False
            image.draft("RGB", (64, 64))  # reads all bytes, computes few pixels
            image.load()
    except (OSError, Image.DecompressionBombError):
        return False
    return True
