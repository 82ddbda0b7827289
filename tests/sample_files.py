"""Sample files that the code on the pages reads."""

import io
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
from PIL import Image

import keras_dist


def write(x, y):
    """Writes a directory `train` with files of each format on rank 0; all ranks wait for it."""
    if keras_dist.rank() == 0:
        folder = Path("train")
        folder.mkdir(exist_ok=True)
        np.savez(folder / "0.npz", images=x, labels=y)
        columns = {"age": x[:, 0], "height": x[:, 1], "weight": y[:, 0]}
        pa.parquet.write_table(pa.table(columns), folder / "0.parquet")
        with tarfile.open(folder / "0.tar", "w") as archive:
            for number in range(8):
                name = folder / f"class {number % 2}" / f"{number}.jpg"
                name.parent.mkdir(exist_ok=True)
                Image.new("RGB", (4, 4), (number, 0, 0)).save(name)
                archive.add(name, name.relative_to(folder))
                info = tarfile.TarInfo(str(name.relative_to(folder).with_suffix(".cls")))
                info.size = 1
                archive.addfile(info, io.BytesIO(str(number % 2).encode()))
    keras_dist.barrier()
