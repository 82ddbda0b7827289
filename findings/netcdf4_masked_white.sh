#!/usr/bin/env bash
# Library: netCDF4 1.7.5.1.post1 with numpy 2.4.6.
# Behaviour: `variable[:]` masks the value 255 of a variable of dtype `u1`, and -127 of `i1`, though
#   the variable has no attribute `_FillValue` or `missing_value`. Arithmetic skips masked elements,
#   and `numpy.asarray`, by which Keras and others take arrays, drops the mask: an image divided by
#   255 has white as 255.0 instead of 1.0, and its mean is that of the other pixels.
# Expected: all 256 values are data, as xarray and h5py read them. The documentation says that values
#   equal to these attributes are masked, and a byte has no value to spare for a default.
# Seen in: src/netCDF4/_netCDF4.pyx, Variable._toma, which masks the default fill value of the type.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet netCDF4==1.7.5.1.post1 h5py==3.14.0 numpy==2.4.6

cd "$folder"
"$folder/venv/bin/python" - <<'EOF'
import sys

import h5py
import netCDF4
import numpy as np

with netCDF4.Dataset("image.nc", "w") as file:
    file.createDimension("pixel", 3)
    file.createVariable("image", "u1", ("pixel",))[:] = [0, 51, 255]
with netCDF4.Dataset("image.nc") as file:
    attributes, image = file["image"].ncattrs(), file["image"][:]
with h5py.File("image.nc") as file:
    stored = file["image"][:].tolist()

taken = np.asarray(image / 255).round(1).tolist()
print(f"attributes {attributes}, stored {stored}, read {image}, mean {image.mean()}")
print(f"divided by 255, by numpy.asarray: {taken}")
if (attributes, stored, image.mask.tolist()) != ([], [0, 51, 255], [False, False, True]):
    sys.exit("The behaviour has changed; seen before: 255 is masked")
if image.mean() != 25.5 or taken != [0.0, 0.2, 255.0]:
    sys.exit("The behaviour has changed; seen before: mean 25.5, and 255.0 by numpy.asarray")
EOF
