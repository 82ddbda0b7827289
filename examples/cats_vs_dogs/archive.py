"""Zip archives of cats and dogs, unpacked with care for what else may be in them."""

import re
import shutil
import tempfile
import zipfile
import zlib
from pathlib import Path, PurePosixPath

# As Kaggle names the pictures, `cat.12.jpg`, and as Microsoft does, `Cat/12.jpg`.
NAME = re.compile(r"(?:^|/)(cat|dog)(?:\.|/)(\d{1,9})\.jpe?g$", re.IGNORECASE)
MAX_FILES = 100_000
MAX_FILE_NBYTES = 20 << 20
MAX_NBYTES = 8 << 30
MAX_RATIO = 50  # JPEG hardly compresses; what grows more is made to fill disks


def unpack(archive, folder):
    """Unpacks the pictures of an archive as `cat.N.jpg` and `dog.N.jpg`, all of them or none.

    No path of the archive is used: names are made anew from animal and number. What is not
    called like a picture is left out.

    Args:
        archive: path of the zip file.
        folder: where to unpack; nothing is done where it exists.

    Raises:
        ValueError: the file is no zip archive, is damaged, holds no pictures or is not to be
            trusted; the message says why.
    """
    folder = Path(folder)
    if folder.exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix="unpacking-", dir=folder.parent))
    try:
        with zipfile.ZipFile(archive) as opened:
            for name, entry in _pictures(opened.infolist()).items():
                (unfinished / name).write_bytes(opened.read(entry))
        unfinished.replace(folder)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise ValueError(f"{archive} is not a zip archive, or is damaged: {error}") from error
    except ValueError as error:
        raise ValueError(f"{archive} is not unpacked: {error}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _pictures(entries):
    """Returns the entries that are pictures, by the name that each is to get.

    What they say of their size can be relied upon: zipfile reads no further than that, and
    raises an error where the bytes are others.
    """
    if len(entries) > MAX_FILES:
        raise ValueError(f"{len(entries):,} files, at most {MAX_FILES:,} are expected")
    found = {}
    for entry in entries:
        path = PurePosixPath(entry.filename.replace("\\", "/"))
        first = path.parts[0] if path.parts else ""  # "./" has none
        if path.is_absolute() or ".." in path.parts or ":" in first:
            raise ValueError(f"{entry.filename!r} leads out of the archive")
        match = NAME.search(str(path))
        if match is None or entry.is_dir():
            continue
        name = f"{match[1].lower()}.{int(match[2])}.jpg"
        if name in found:
            raise ValueError(f"two files are to become {name}, one of them {entry.filename!r}")
        _check_size(entry)
        found[name] = entry
    if sum(entry.file_size for entry in found.values()) > MAX_NBYTES:
        raise ValueError(f"more than {MAX_NBYTES >> 30} GiB")
    if not found:
        raise ValueError("no files called cat.N.jpg or dog.N.jpg, Cat/N.jpg or Dog/N.jpg")
    return found


def _check_size(entry):
    if entry.flag_bits & 1:
        raise ValueError(f"{entry.filename!r} is encrypted")
    large = entry.file_size > MAX_FILE_NBYTES
    if large or entry.file_size > MAX_RATIO * max(entry.compress_size, 1024):
        raise ValueError(
            f"{entry.filename!r} has {entry.file_size:,} bytes, packed into "
            f"{entry.compress_size:,}: that is no photograph"
        )
