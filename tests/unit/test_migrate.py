"""`keras-dist migrate`: proposed changes and messages for sample scripts."""

import os
import subprocess
import sys

import pytest

from keras_dist.launch.cli import main

KERAS = """\
import tensorflow as tf
import horovod.tensorflow.keras as hvd  # many ranks

hvd.init()
gpus = tf.config.experimental.list_physical_devices("GPU")
if gpus:
    tf.config.experimental.set_visible_devices(gpus[hvd.local_rank()], "GPU")
opt = hvd.DistributedOptimizer(tf.optimizers.Adam(0.001 * hvd.size()), num_groups=2)
model.compile(
    loss="mse",
    optimizer=opt,
    experimental_run_tf_function=False,
)
model.compile("sgd", "mse", experimental_run_tf_function = False)
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
if hvd.rank() == 0:
    callbacks.append(tf.keras.callbacks.ModelCheckpoint("./checkpoint.h5"))
loss = hvd.allreduce(loss, average=True)
total = hvd.allreduce(loss, average=False, name="total")
either = hvd.allreduce(loss, average=flag)
"""

KERAS_AFTER = """\
import tensorflow as tf
import keras_dist as hvd  # many ranks

hvd.init()
gpus = tf.config.experimental.list_physical_devices("GPU")
if gpus:
    # keras_dist: init has selected the GPU of this rank; this line can be removed.
    tf.config.experimental.set_visible_devices(gpus[hvd.local_rank()], "GPU")
opt = hvd.DistributedOptimizer(tf.optimizers.Adam(0.001 * hvd.size()), groups=2)
model.compile(
    loss="mse",
    optimizer=opt,
)
model.compile("sgd", "mse")
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
if hvd.rank() == 0:
    callbacks.append(tf.keras.callbacks.ModelCheckpoint("./checkpoint.h5"))
loss = hvd.allreduce(loss, op=hvd.Average)
total = hvd.allreduce(loss, op=hvd.Sum, name="total")
either = hvd.allreduce(loss, op=hvd.Average if flag else hvd.Sum)
"""


@pytest.fixture
def migrate(tmp_path, capsys):
    """A function that returns exit code, output and errors for the text of a script."""
    script = tmp_path / "train.py"

    def run(text, *options, encoding="utf-8"):
        script.write_bytes(text.encode(encoding))
        code = main(["migrate", *options, str(script)])
        said = capsys.readouterr()
        text = script.read_bytes().decode(encoding)
        return code, said.out, said.err.replace(f"{script}:", ""), text

    return run


def test_a_script_for_keras(migrate):
    code, diff, notes, text = migrate(KERAS)
    assert (code, text) == (1, KERAS)
    assert "-import horovod.tensorflow.keras as hvd  # many ranks" in diff
    assert "+import keras_dist as hvd  # many ranks" in diff
    assert notes.startswith("16: a checkpoint on rank 0 only")
    code, _, _, text = migrate(KERAS, "--write")
    assert (code, text) == (3, KERAS_AFTER)
    assert migrate(KERAS_AFTER)[:2] == (0, "")


# What a line becomes.
LINES = """\
import horovod.keras as hvd ==> import keras_dist as hvd
import horovod.tensorflow as hvd ==> import keras_dist.tensorflow as hvd
import os, horovod.torch as hvd ==> import os, keras_dist.torch as hvd
import horovod.torch.elastic as e ==> import keras_dist.elastic as e
from horovod import torch as hvd ==> import keras_dist.torch as hvd
from horovod import run, __version__ ==> from keras_dist import run, __version__
from horovod import runner ==> import keras_dist as runner
from horovod.common import exceptions ==> import keras_dist.elastic as exceptions
from horovod.common.exceptions import HorovodInternalError ==> \
from keras_dist.elastic import HorovodInternalError
from horovod.common.process_sets import ProcessSet ==> from keras_dist import ProcessSet
from horovod.keras.callbacks import MetricAverageCallback ==> \
from keras_dist.callbacks import MetricAverageCallback
from horovod.runner import run as start ==> from keras_dist import run as start
from horovod.tensorflow import keras as hvd ==> import keras_dist as hvd
from horovod.tensorflow.sync_batch_norm import SyncBatchNormalization ==> \
from keras_dist.tensorflow import SyncBatchNormalization
from horovod.torch import init, rank ==> from keras_dist.torch import init, rank
from horovod.torch.mpi_ops import allreduce ==> from keras_dist.torch import allreduce
from horovod.torch.optimizer import DistributedOptimizer ==> \
from keras_dist.torch import DistributedOptimizer
from horovod.torch.sync_batch_norm import SyncBatchNorm ==> \
from keras_dist.torch import SyncBatchNorm
"""
TEXTS = {
    "from horovod import torch, tensorflow as tf, run": (
        "import keras_dist.torch as torch; import keras_dist.tensorflow as tf; "
        "from keras_dist import run"
    ),
    "import horovod.torch\nhorovod.torch.allreduce(x, average=True)": (
        "import keras_dist.torch\nkeras_dist.torch.allreduce(x, op=keras_dist.torch.Average)"
    ),
    "import horovod\nhorovod.run(train, np=2)": "import keras_dist\nkeras_dist.run(train, np=2)",
    "import horovod.torch\nprint(horovod.__version__, horovod.torch.rank())": (
        "import keras_dist.torch\nprint(keras_dist.__version__, keras_dist.torch.rank())"
    ),
    "import horovod.torch as hvd\nnorm = nn.GroupNorm(num_groups=8, num_channels=64)": (
        "import keras_dist.torch as hvd\nnorm = nn.GroupNorm(num_groups=8, num_channels=64)"
    ),
    "import horovod.tensorflow as hvd\nhvd.broadcast_variables(opt.variables(), 0)": (
        "import keras_dist.tensorflow as hvd\nhvd.broadcast_variables(opt.variables, 0)"
    ),
    "import torch\r\nimport horovod.keras\r\n": "import torch\r\nimport keras_dist\r\n",
    "import horovod.torch as hvd\ntorch.cuda.set_device(hvd.local_rank())": (
        "import keras_dist.torch as hvd\n"
        "# keras_dist: init has selected the GPU of this rank; this line can be removed.\n"
        "torch.cuda.set_device(hvd.local_rank())"
    ),
    **dict(line.split(" ==> ") for line in LINES.splitlines()),
}


@pytest.mark.parametrize("before", TEXTS)
def test_imports_and_what_follows_from_them(migrate, before):
    assert migrate(before, "--write")[::3] == (0, TEXTS[before])


OLD = """\
import horovod.tensorflow as hvd
from horovod.tensorflow import broadcast_object_fn, allreduce
import horovod.mxnet as mx
from horovod import spark
from horovod.runner.common import util

hooks = [hvd.BroadcastGlobalVariablesHook(0)]
hvd.broadcast_global_variables(0)
allreduce(x, average=True)
horovod = other.allreduce(x, average=True)
if hvd.rank() == 0:
    callbacks = [hvd.callbacks.BestModelCheckpoint()]
"""


@pytest.mark.parametrize(
    ("module", "use"),
    [
        ("horovod.common.util", "horovod.common.util.f(horovod.common)"),
        ("horovod.torch.util", "horovod.torch.util.f(horovod.torch.util)"),
        ("horovod.tensorflow.data", "horovod.tensorflow.data.f()"),
        ("horovod.spark", "horovod.spark.run(f)"),
    ],
)
def test_names_of_modules_that_are_left_stay_too(migrate, module, use):
    left = f"import {module}\n{use}\n"
    before = f"import horovod.torch\n{left}horovod.torch.rank()\n"
    _, _, notes, text = migrate(before, "--write")
    assert text == f"import keras_dist.torch\n{left}keras_dist.torch.rank()\n"
    assert notes.startswith("2: ")


def test_what_is_left_to_the_user_is_named_by_line(migrate):
    assert migrate(OLD)[0] == 1
    code, _, notes, text = migrate(OLD, "--write")
    assert code == 3
    *notes_of_lines, last = notes.splitlines()
    lines = [int(line.partition(":")[0]) for line in notes_of_lines]
    assert last == "keras-dist migrate: 8 lines are left to change manually."
    assert lines == [2, 3, 4, 5, 7, 8, 9, 11]
    assert "7: hvd.BroadcastGlobalVariablesHook: TensorFlow 1 only" in notes
    assert "import horovod.mxnet as mx\nfrom horovod import spark\n" in text
    assert "from horovod.runner.common import util\n" in text
    assert "allreduce(x, average=True)\nhorovod = other.allreduce(x, average=True)" in text


@pytest.mark.parametrize(
    "line",
    [
        "from horovod import common",
        "from horovod import torch, common",
        "from horovod.runner import launch",
        "from horovod.torch.optimizer import _DistributedOptimizer",
        "from horovod.common import util",
        "from horovod.tensorflow import data",
        "import horovod.common as common",
    ],
)
def test_modules_that_there_are_not_are_left_and_named(migrate, line):
    code, diff, notes, _ = migrate(line)
    assert (code, diff) == (3, "")
    assert notes.startswith("1: keras_dist has no ")
    assert notes.endswith("\nkeras-dist migrate: 1 line is left to change manually.\n")


@pytest.mark.parametrize(
    ("call", "note"),
    [
        ('importlib.import_module("horovod.torch")', "horovod.torch is called keras_dist.torch"),
        ("import_module(('horovod.'\n'ray'))", None),  # the reader closes after one word
        ("pytest.importorskip('horovod.ray')", "keras_dist.ray has RayExecutor"),
        ('getLogger("horovod.torch")', None),
        ("find_spec()", None),
        ("find_spec(name)", None),
        ('import_module("os")', None),
    ],
)
def test_modules_that_are_imported_by_a_text_are_named(migrate, call, note):
    code, diff, notes, _ = migrate(f"{call}\n")
    assert (code, diff) == (3 if note else 0, "")
    assert notes.startswith("1: ") and note in notes if note else notes == ""


def test_a_script_is_written_in_utf_8_whatever_the_locale(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import horovod.keras  # é\n", encoding="utf-8")
    script.chmod(0o750)
    command = [sys.executable, "-m", "keras_dist.launch.cli", "migrate", "--write", str(script)]
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run(command, env={**os.environ, **plain, "PYTHONIOENCODING": "utf-8"}, check=True)
    assert script.read_bytes() == "import keras_dist  # é\n".encode()
    assert script.stat().st_mode & 0o777 == 0o750
    assert list(tmp_path.iterdir()) == [script]


@pytest.mark.parametrize(
    ("first", "encoding"),
    [("# -*- coding: latin-1 -*-\n", "latin-1"), ("\ufeff", "utf-8"), ("", "utf-8")],
)
def test_a_script_keeps_its_encoding(migrate, first, encoding):
    text = f"{first}import horovod.keras  # é\r\n"
    code, _, _, after = migrate(text, "--write", encoding=encoding)
    assert (code, after) == (0, f"{first}import keras_dist  # é\r\n")


def test_what_is_in_no_encoding_says_how_to_name_one(migrate):
    for first in ("", "# coding: none\n", "# coding: rot13\n"):
        code, _, said, _ = migrate(f"{first}x = 'é'\n", encoding="latin-1")
        assert code == 2
        assert said.endswith("# -*- coding: latin-1 -*-\n")


def test_a_last_line_without_an_end_is_marked_as_diff_does(migrate):
    end = "\\ No newline at end of file\n"
    _, diff, _, _ = migrate("x = '\f'\nimport horovod.torch as hvd")
    assert diff.endswith(
        f" x = '\f'\n-import horovod.torch as hvd\n{end}+import keras_dist.torch as hvd\n{end}"
    )


@pytest.mark.parametrize("text", ["import os\n", ""])
def test_there_is_nothing_to_do(migrate, text):
    assert migrate(text)[:3] == (0, "", "")


def test_what_is_no_script(migrate, capsys, tmp_path):
    code, _, said, _ = migrate("print 'old'\n", "--write")
    assert code == 2
    assert "Expected a script in Python 3. Received: " in said
    assert main(["migrate", "nowhere.py"]) == 2
    assert "nowhere.py" in capsys.readouterr().err
    notebook = tmp_path / "train.ipynb"
    notebook.write_text('{"cells": [{"source": ["import horovod.torch as hvd"]}]}')
    assert main(["migrate", str(notebook)]) == 2
    assert "train.ipynb, a notebook. Save it as a script" in capsys.readouterr().err
