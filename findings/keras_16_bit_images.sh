#!/usr/bin/env bash
# Library: Keras 3.15.1 with TensorFlow 2.21.0, grain 0.2.18 and Pillow 13.0.0.
# Behaviour: the two formats of `image_dataset_from_directory` read a grey PNG of 16 bits
#   differently. "tf" gives the upper 8 bits in each color mode. "grain" keeps all 16 bits in the
#   mode "grayscale", and limits values to 255 in the mode "rgb".
# Expected: the same pixels, of 0 to 255, from both formats and in both modes. With "rgb", grain
#   turns all but the darkest pixels to white.
# Seen in: keras/src/utils/image_dataset_utils.py, load_image (tf.image.decode_image) and
#   _load_image_grain, which calls load_img of keras/src/utils/image_utils.py (Image.convert of
#   Pillow).
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet keras==3.15.1 tensorflow-cpu==2.21.0 grain==0.2.18 pillow==13.0.0 numpy==2.4.6

cd "$folder"
KERAS_HOME="$folder" KERAS_BACKEND=tensorflow TF_CPP_MIN_LOG_LEVEL=3 "$folder/venv/bin/python" - <<'EOF'
import contextlib
import io
import pathlib
import sys

import keras
import numpy as np
from PIL import Image

pathlib.Path("images").mkdir()
Image.fromarray(np.array([[0, 1000], [40000, 65535]], "uint16")).save("images/grey.png")

expected = {
    ("tf", "grayscale"): [0, 3, 156, 255],
    ("tf", "rgb"): [0, 3, 156, 255],
    ("grain", "grayscale"): [0, 1000, 40000, 65535],
    ("grain", "rgb"): [0, 255, 255, 255],
}
for (format_, mode), pixels in expected.items():
    with contextlib.redirect_stdout(io.StringIO()):  # the number of files
        data = keras.utils.image_dataset_from_directory(
            "images", labels=None, color_mode=mode, image_size=(2, 2), shuffle=False, format=format_
        )
    seen = np.asarray(next(iter(data)))[0, :, :, 0].ravel().astype(int).tolist()
    print(f"{format_}, {mode}: {seen}")
    if seen != pixels:
        sys.exit(f"The behaviour has changed; seen before: {pixels}")
EOF
