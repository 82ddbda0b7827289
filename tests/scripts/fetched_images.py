"""Simulates the public archive and the weights, without and with a network."""

import functools
import hashlib
import http.server
import pathlib
import sys
import threading
from typing import Any

import h5py
import images  # type: ignore[import-not-found]  # of the example
import keras
import network  # type: ignore[import-not-found]
from keras.src.applications import mobilenet_v2
from keras.src.legacy.saving import legacy_h5_format

import keras_dist

keras_dist.init()
served = pathlib.Path(sys.argv[1])


def look(port: int) -> tuple[Any, ...]:
    mobilenet_v2.BASE_WEIGHT_PATH = f"http://127.0.0.1:{port}/"
    images.PUBLIC = mobilenet_v2.BASE_WEIGHT_PATH + "public.zip"
    files, source = images.find_images("auto", 6)
    return len(files), source, network.make_network("mobilenet", 32)


count, source, model = look(9)  # nobody is there
assert (count, source, model.name) == (6, "drawings", "small"), (count, source, model.name)

images.PUBLIC_SHA256 = hashlib.sha256((served / "public.zip").read_bytes()).hexdigest()
weights = served / "mobilenet_v2_weights_tf_dim_ordering_tf_kernels_1.0_96_no_top.h5"
with h5py.File(weights, "w") as file:
    shape = (network.SIZE_OF_MOBILENET, network.SIZE_OF_MOBILENET, 3)
    made = keras.applications.MobileNetV2(shape, include_top=False, weights=None)
    legacy_h5_format.save_weights_to_hdf5_group(file, made)
handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=served)
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
count, source, model = look(server.server_port)
assert (count, source) == (4, "photographs from Microsoft's archive"), (count, source)
assert model.name == "mobilenet" and len(model.trainable_variables) == 2
