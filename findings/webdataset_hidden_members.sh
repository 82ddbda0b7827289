#!/usr/bin/env bash
# Library: webdataset 1.0.2.
# Behaviour: hidden files of a folder in a tar, `a/.7.jpg` and `a/.8.png`, become one sample with
#   the key `a/` and the fields `7.jpg` and `8.png`. The hidden file `.9.jpg` at the top of the
#   tar is skipped.
# Expected: hidden files are treated alike at each level, skipped or with the keys `a/.7` and
#   `.9`. Files that a desktop leaves in folders otherwise form samples of unrelated members.
# Seen in: webdataset/tariterators.py, base_plus_ext: the part before the first dot may consist of
#   the folder alone, since it may contain slashes, but it may not be empty.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet webdataset==1.0.2 numpy==2.4.6

cd "$folder"
"$folder/venv/bin/python" - <<'EOF'
import io
import sys
import tarfile

import webdataset

with tarfile.open("samples.tar", "w") as archive:
    for name in ("a/.7.jpg", "a/.8.png", ".9.jpg", "a/10.jpg"):
        member = tarfile.TarInfo(name)
        member.size = 1
        archive.addfile(member, io.BytesIO(b"x"))

seen = [
    (sample["__key__"], [field for field in sample if not field.startswith("__")])
    for sample in webdataset.WebDataset("samples.tar", shardshuffle=False)
]
for key, fields in seen:
    print(f"key {key!r}, fields {fields}")
if seen != [("a/", ["7.jpg", "8.png"]), ("a/10", ["jpg"])]:
    sys.exit("The behaviour has changed; seen before: keys 'a/' and 'a/10', without .9.jpg")
EOF
