#!/usr/bin/env bash
# Library: TensorFlow 2.21.0 (tensorflow-cpu).
# Behaviour: `tf.image.decode_image(channels=4)` of a PNG without transparency and with fewer than
#   8 bits a pixel returns an alpha of 1 for 1 bit, 3 for 2 bits and 15 for 4 bits. Colors are
#   scaled to 0 to 255.
# Expected: an alpha of 255, opaque, as for 8 bits. Code that blends by alpha sees such images as
#   almost invisible, and only those that an encoder happened to store with few bits.
# Seen in: tensorflow/core/lib/png/png_io.cc, CommonInitDecode: alpha is the largest value of the
#   bits of the file, while grey values and palettes are expanded to 8 bits.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet tensorflow-cpu==2.21.0 numpy==2.4.6

cd "$folder"
KERAS_HOME="$folder" KERAS_BACKEND=tensorflow TF_CPP_MIN_LOG_LEVEL=3 "$folder/venv/bin/python" - <<'EOF'
import struct
import sys
import zlib

import tensorflow as tf

GREY, PALETTE = 0, 3


def png(bits, kind):
    """Returns a PNG of one pixel, white."""
    header = struct.pack(">IIBBBBB", 1, 1, bits, kind, 0, 0, 0)
    palette = [(b"PLTE", b"\xff\xff\xff" * 2**bits)] if kind == PALETTE else []
    data = zlib.compress(bytes([0, 255]))  # a row without a filter; the pixel is in the upper bits
    result = b"\x89PNG\r\n\x1a\n"
    for name, content in [(b"IHDR", header), *palette, (b"IDAT", data), (b"IEND", b"")]:
        result += struct.pack(">I", len(content)) + name + content
        result += struct.pack(">I", zlib.crc32(name + content))
    return result


for name, kind in (("grey", GREY), ("palette", PALETTE)):
    for bits in (1, 2, 4, 8):
        seen = tf.image.decode_image(png(bits, kind), channels=4).numpy().ravel().tolist()
        print(f"{name}, {bits} bits: {seen}")
        if seen != [255, 255, 255, 2**bits - 1]:
            sys.exit(f"The behaviour has changed; alpha seen before: {2**bits - 1}")
EOF
