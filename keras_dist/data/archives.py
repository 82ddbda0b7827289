"""Tar and zip files, unpacked without writing outside of the target directory."""

import os
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def unpack(archive: Path, target: Path) -> None:
    """Unpacks an archive into a new directory."""
    target.mkdir()
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as opened:
            for name in opened.namelist():
                if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                    raise OSError(f"it has {name!r}, a path outside of it")
            opened.extractall(target)
    else:
        with tarfile.open(archive) as opened:
            if hasattr(tarfile, "data_filter"):
                opened.extractall(target, filter="data")
            else:  # Python before 3.11.4
                opened.extractall(target, _files_in(opened))


def _files_in(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Yields the members of an archive, which must be files or directories within it."""
    for member in archive:
        path = PurePosixPath(member.name)
        if path.is_absolute() or ".." in path.parts or not (member.isfile() or member.isdir()):
            raise OSError(f"it has {member.name!r}, a link or a path outside of it")
        member.uid, member.gid = os.getuid(), os.getgid()
        member.uname = member.gname = ""  # root would give the files to users of these names
        member.mode = member.mode & 0o755 | (0o700 if member.isdir() else 0o600)
        yield member
