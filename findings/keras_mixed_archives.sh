#!/usr/bin/env bash
# Library: Keras 3.15.1.
# Behaviour: `keras.utils.get_file(fname, origin, extract=True)` extracts into a directory whose name
#   is `fname` up to its first dot. Archives `flowers-1.0.zip` and `flowers-1.1.zip` share one, so the
#   second call returns the files of both. Each call extracts again, also of a file in the cache.
# Expected: a directory for each archive, extracted once. As it is, a data set of the directory has
#   samples of another version, and a rank or process that reads it while another calls `get_file`
#   may find half a file.
# Seen in: keras/src/utils/file_utils.py, get_file: `fname[: fname.find(".")]`, and `extract_archive`.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet keras==3.15.1 jax==0.10.2 numpy==2.4.6

cd "$folder"
KERAS_HOME="$folder/home" KERAS_BACKEND=jax "$folder/venv/bin/python" - <<'EOF'
import contextlib
import io
import pathlib
import sys
import zipfile

import keras


def fetch(version):
    """Returns the directory of an archive with one file, as for an archive on the web."""
    path = pathlib.Path(f"flowers-{version}.zip").resolve()
    if not path.exists():
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(f"rose-{version}.txt", version)
    with contextlib.redirect_stdout(io.StringIO()):  # the progress
        return pathlib.Path(keras.utils.get_file(path.name, path.as_uri(), extract=True))


def files(directory):
    return sorted(each.name for each in directory.iterdir())


first, second = fetch("1.0"), fetch("1.1")
print(f"{first.name} and {second.name}: {files(second)}")
(first / "rose-1.0.txt").unlink()
again = fetch("1.0")
print(f"after the removal of a file, and another call: {files(again)}")
if first != second or files(second) != files(again) or len(files(second)) != 2:
    sys.exit("The behaviour has changed; seen before: one directory with the files of both")
EOF
