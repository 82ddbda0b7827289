#!/usr/bin/env bash
# Library: TensorFlow 2.21.0, with files of Pillow 13.0.0.
# Behaviour: `decode_image` and `decode_bmp` read a BMP with a palette of 256 colours as a grey image
#   of the numbers of its colours, without an error, also with `channels=3`.
# Expected: its colours, as for a PNG with a palette, or an error. As it is, pixels depend on the order
#   of the palette, and a data set of such files trains on noise.
# Seen in: tensorflow/core/kernels/image/decode_image_op.cc, DecodeBmpV2 and Decode: of a file of
#   8 bits per pixel the table of colours is skipped.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet tensorflow-cpu==2.21.0 pillow==13.0.0 numpy==2.4.6

cd "$folder"
TF_CPP_MIN_LOG_LEVEL=3 "$folder/venv/bin/python" - <<'EOF'
import sys

import tensorflow as tf
from PIL import Image

image = Image.new("P", (1, 2))
image.putpalette([250, 10, 90, 0, 200, 40])
image.putpixel((0, 1), 1)

seen = {}
for name in ("png", "bmp"):
    image.save(f"image.{name}")
    decoded = tf.io.decode_image(tf.io.read_file(f"image.{name}"), channels=3)
    seen[name] = decoded.numpy()[:, 0].tolist()
    print(f"{name}: {seen[name]}")
colours = [[250, 10, 90], [0, 200, 40]]
if seen != {"png": colours, "bmp": [[0, 0, 0], [1, 1, 1]]}:
    sys.exit(f"The behaviour has changed; seen before: {colours} of the PNG, 0 and 1 of the BMP")
EOF
