"""The code blocks of the pages: finds them, and runs them on the ranks of a job.

```
mpiexec -n 2 python tests/pages.py docs/guide/data.md      # without a name: all pages and the API
```

Blocks of a page run in order, in one namespace that starts with `PRELUDE`. Further definitions that
a page assumes are in comments that readers do not see:

<!-- python
learning_rate = 0.1
-->

Of a table of old and new lines the new ones run, and of a diff what it leads to. A block that calls
`keras_dist.run` runs in a process that is not a rank. A block with a line `...` is incomplete and
only compiled.
"""

import ast
import functools
import os
import re
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(
    r"^ *(?:```(?P<language>\w+)|<!-- (?P<hidden>python))\n"
    r"(?P<code>.*?)^ *(?:```|-->)$",
    re.MULTILINE | re.DOTALL,
)
# Old line, new line, difference.
TABLE = re.compile(r"^\| Horovod \| keras_dist \|.*\n\|.*\n(?P<rows>(\|.*\n)+)", re.MULTILINE)
SPAN = re.compile(r"`([^`]+)`")
PRELUDE = """
import keras
import numpy as np
import keras_dist

keras_dist.init()

def build_model():
    layers = [keras.Input((8,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(1)]
    return keras.Sequential(layers)

x_train, x_test = np.split(np.random.default_rng(0).random((192, 8), "float32"), [128])
y_train, y_test = (x.sum(axis=1, keepdims=True) for x in (x_train, x_test))
x, y = x_train, y_train
dataset = keras_dist.data.shard((x_train, y_train), batch_size=32)
model = build_model()
optimizer = keras_dist.DistributedOptimizer(keras.optimizers.SGD(0.01))
model.compile(optimizer, loss="mse")
"""
# Further definitions that examples in docstrings assume.
GRANTED = """
import pathlib
import h5py
import tensorflow as tf
from sample_files import write

write(x_train, y_train)
size, rate, value, loss = keras_dist.size(), 0.01, 1.0, 0.5
rows, indices, table = np.ones((7, 3)), np.arange(7), np.zeros((9, 3))
batches, statistics, gradient = [], np.ones(3), np.ones(5, "float32")

def train_step(batch):
    pass

def prepare():
    pass

def parse(record):
    row = tf.ensure_shape(tf.io.decode_raw(record, tf.float32), (8,))
    return row, tf.reduce_sum(row, keepdims=True)

if keras_dist.rank() == 0:
    model.save("model.keras")
    pathlib.Path("train").mkdir(exist_ok=True)
    with tf.io.TFRecordWriter("train/0.tfrecord") as file:
        for row in x_train:
            file.write(row.tobytes())
    np.save("x.npy", x_train)
    np.save("y.npy", y_train)
    with h5py.File("train.h5", "w") as file:
        file["images"], file["labels"] = x_train, y_train
keras_dist.barrier()
"""


def pages():
    """Returns the pages of the site that are not generated."""
    found = [*ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*/README.md")]
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(found)]


def blocks(text, *languages):
    """Yields line and code of the blocks in the given languages."""
    for found in BLOCK.finditer(text):
        if (found["language"] or found["hidden"]) in languages:
            yield line_of(text, found.start("code")), textwrap.dedent(found["code"])


def new_lines(text):
    """Yields line and code of the second column of tables, for Python and the shell."""
    for table in TABLE.finditer(text):
        first = line_of(text, table.start("rows"))
        for number, row in enumerate(table["rows"].splitlines()):
            for span in SPAN.findall(row.split("|")[2]):
                yield first + number, span


def results(text):
    """Yields line and code of what the diffs of a page lead to; a line that goes is empty."""
    for line, code in blocks(text, "diff"):
        kept = ("" if each.startswith("-") else each[1:] for each in code.splitlines())
        yield line, "\n".join(kept) + "\n"


def line_of(text, position):
    return text.count("\n", 0, position) + 1


def is_command(code):
    return code.startswith("keras-dist ")


def pieces(text):
    """Returns line and code of all Python in a page, in order."""
    rows = [(line, code) for line, code in new_lines(text) if not is_command(code)]
    return sorted([*blocks(text, "python"), *results(text), *rows], key=lambda piece: piece[0])


def place(code):
    """Returns where a block of Python runs: on ranks, outside of ranks, or nowhere."""
    if re.search(r"^ *\.\.\.$", code, re.MULTILINE):
        return "nowhere"
    return "outside" if "keras_dist.run(" in code else "on ranks"


def docstrings():
    """Yields path and examples of the docstrings that have some, at their line numbers."""
    for path in sorted(ROOT.glob("keras_dist/**/*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                text = ast.get_docstring(node)
                if text and "```python" in text:
                    yield path, "\n" * (node.body[0].lineno - 1) + text


def run(path, text):
    """Runs the Python code of a text."""
    space = {"__name__": "__main__"}
    exec(PRELUDE if path.suffix == ".md" else PRELUDE + GRANTED, space)
    for line, code in pieces(text):
        compiled = compile("\n" * (line - 1) + code, str(path), "exec")
        if place(code) == "on ranks":
            exec(compiled, space)
    space["keras_dist"].shutdown()  # and its process sets


def shorten_training():
    """Limits `fit` to two epochs."""
    import keras

    fit = keras.Model.fit

    @functools.wraps(fit)
    def short(self, *args, epochs=1, **options):
        return fit(self, *args, epochs=min(epochs, 2), verbose=2, **options)

    keras.Model.fit = short


def main():
    wanted = [Path(name).resolve() for name in sys.argv[1:]]
    texts = [(path, path.read_text()) for path in wanted or pages()]
    texts += [] if wanted else docstrings()
    shorten_training()
    with_python = [(path, text) for path, text in texts if pieces(text)]
    for path, text in with_python:
        run(path, text)
    # The output of ranks may be interleaved.
    Path(f"ran-{os.getpid()}").write_text("\n".join(str(path) for path, _ in with_python))


if __name__ == "__main__":
    main()
