"""Trains with local steps and compares the validation loss with that of synchronous training.

    python benchmarks/local_steps.py [--ranks 2 4] [--steps 1 16 64 256] [--seeds 3] [--quick]
    python benchmarks/local_steps.py --resume     # goes on after an interrupted run
    python benchmarks/local_steps.py --small      # a decoder of 0.3 million parameters
    python benchmarks/local_steps.py --fragments 2 --delay 4 --compression int8

A decoder of 3.3 million parameters learns to continue text, byte by byte, and a small convolutional
network to read digits. The text is what packages ship: the topics of Python's own help, and the
docstrings of Keras. The digits are those of scikit-learn. Every run sees as many samples, in
batches of the same size over all ranks; it is a job of its own. What is compared is the loss of
validation data that no run has trained on, as the mean over the seeds of initial weights and order.
"""

import ast
import json
import os
import pydoc_data.topics
import statistics
from pathlib import Path

import numpy as np
from common import answer, conclude, load, options_of, parser, plotter, slug, start, surroundings
from common import table as tabulated

LENGTH, HEADS, BYTES = 64, 4, 256
USUAL, SMALL = (256, 4), (96, 2)  # width and blocks
VALIDATION = 512  # samples of text
LONGEST = 200  # characters of docstrings that are no text yet
PARTS, STEPS = 8, 256  # a part is a call of fit: the loss is taken after each
TITLES = {"text": "decoder, text", "images": "CNN, digits"}
BATCH = {"text": 16, "images": 32}  # over all ranks
DEFAULT = 16  # local steps
STREAMING = ("fragments", "delay", "compression")
LOSES = 0.02  # of the validation loss, at most, with the defaults
SYNCHRONOUS = "every step"


def main():
    made = parser(__doc__)
    made.add_argument("--backend", choices=["tensorflow", "jax", "torch"], default="torch")
    made.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    made.add_argument("--steps", type=int, nargs="*", default=[1, 16, 64, 256])
    made.add_argument("--tasks", nargs="+", choices=list(TITLES), default=list(TITLES))
    made.add_argument("--seeds", type=int, default=3)
    made.add_argument(
        "--outer",
        nargs="+",
        default=["default"],
        help='"default", "none", or as in 1.0,0.5: rate and Nesterov momentum of SGD',
    )
    made.add_argument("--fragments", type=int, default=1, help="of local steps, where it can be")
    made.add_argument("--delay", type=int, default=0, help="of averages, where it can be")
    made.add_argument("--compression", default="none", help="of differences after local steps")
    made.add_argument("--small", action="store_true", help="a smaller decoder")
    made.add_argument("--dtype", default="float32", help="dtype policy of the decoder")
    made.add_argument("--resume", action="store_true", help="run only what an earlier run lacks")
    options = options_of(made, work)
    os.environ |= {"KERAS_BACKEND": options.backend, "OMP_NUM_THREADS": "1"}
    size = SMALL if options.small else USUAL
    before, kept = load(), options.output / f"{name_of(options)}.json"
    known = json.loads(kept.read_text()) if options.resume and kept.exists() else {}
    parts = 1 if options.quick else PARTS
    for seed in range(options.seeds):
        for name in options.tasks:
            for ranks in options.ranks:
                for steps, outer in contenders(options):
                    key = key_of(name, ranks, steps, outer, seed)
                    if key in known:
                        continue
                    task = {"task": name, "steps": steps, "outer": outer, "seed": seed}
                    task["dtype"] = options.dtype if name == "text" else "float32"
                    task |= {each: getattr(options, each) for each in STREAMING}
                    known[key] = start(__file__, ranks, {**task, "parts": parts, "size": size})
                    kept.write_text(json.dumps(known))
                    print(key, f"{known[key][-1]:.4f}", flush=True)
    report(options, before, known)


def name_of(options):
    given = {name: getattr(options, name) for name in STREAMING}
    told = [f"{name}_{value}" for name, value in given.items() if value not in (1, 0, "none")]
    return slug("_".join(["local_steps", *(["small"] if options.small else []), *told]))


def contenders(options):
    """Returns pairs of the steps of a round, 0 for none, and the outer optimizer."""
    return [(0, "none"), *((steps, outer) for outer in options.outer for steps in options.steps)]


def key_of(task, ranks, steps, outer, seed):
    return f"{task} {ranks} {steps} {outer} {seed}"


# --- on every rank ---------------------------------------------------------------------------


def work(path):
    import keras

    import keras_dist

    task = json.loads(Path(path).read_text())
    keras_dist.init()
    if keras.backend.backend() == "torch":
        import torch

        torch.set_num_threads(1)
    keras.config.set_dtype_policy(task["dtype"])
    keras.utils.set_random_seed(task["seed"])
    train, held_back = DATA[task["task"]](task["parts"], task["seed"])
    model = decoder(*task["size"]) if task["task"] == "text" else convolutional()
    rate = keras.optimizers.schedules.CosineDecay(
        0.0, task["parts"] * STEPS - 100, warmup_target=1e-3, warmup_steps=100
    )
    options = {}
    if task["steps"]:
        how = outer_of(task["outer"])
        how |= {"fragments": min(task["fragments"], task["steps"])}
        how |= {"delay": min(task["delay"], task["steps"] - 1)}
        options["local_steps"] = keras_dist.LocalSteps(task["steps"], **how)
        options["compression"] = task["compression"]
    optimizer = keras_dist.DistributedOptimizer(keras.optimizers.AdamW(rate), **options)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss=loss)
    size = BATCH[task["task"]] // keras_dist.size()
    losses = []
    for part in train:
        data = keras_dist.data.shard(part, batch_size=size)
        model.fit(data, callbacks=keras_dist.callbacks(), verbose=0)
        losses.append(float(model.evaluate(*held_back, batch_size=64, verbose=0)))
    if keras_dist.rank() == 0:
        answer(path, losses)


def outer_of(word):
    """Returns the argument of `LocalSteps` for a word of `--outer`."""
    import keras

    if word == "default":
        return {}
    if word == "none":
        return {"outer": None}
    rate, momentum = map(float, word.split(","))
    return {"outer": keras.optimizers.SGD(rate, momentum=momentum, nesterov=momentum > 0)}


def text(parts, seed):
    """Returns parts of windows of text with the bytes that come next, and some held back."""
    import keras

    found = list(pydoc_data.topics.topics.values())
    for source in sorted(Path(keras.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                docstring = ast.get_docstring(node) or ""
                found += [docstring] if len(docstring) > LONGEST else []
    characters = np.frombuffer("\n\n".join(dict.fromkeys(found)).encode(), np.uint8)
    count = (len(characters) - 1) // LENGTH
    windows = characters[: count * LENGTH].reshape(count, LENGTH).astype("int32")
    following = characters[1 : count * LENGTH + 1].reshape(count, LENGTH).astype("int32")
    # Blocks of windows are held back, so that none of them overlaps with a docstring learned.
    blocks = np.arange(count) // 64 % (count // VALIDATION) == 0
    held_back = windows[blocks][:VALIDATION], following[blocks][:VALIDATION]
    return cut(windows[~blocks], following[~blocks], parts, BATCH["text"], seed), held_back


def images(parts, seed):
    """Returns parts of images of digits with their classes, and some held back."""
    from sklearn.datasets import load_digits

    found = load_digits()
    inputs, labels = found.images[..., None].astype("float32") / 16, found.target.astype("int32")
    order = np.random.default_rng(0).permutation(len(labels))
    held_back, rest = order[:400], order[400:]
    parts = cut(inputs[rest], labels[rest], parts, BATCH["images"], seed)
    return parts, (inputs[held_back], labels[held_back])


def cut(inputs, labels, parts, batch, seed):
    """Returns parts of `STEPS` batches, epoch after epoch in another order."""
    random, count = np.random.default_rng(seed), parts * STEPS * batch
    epochs = [random.permutation(len(labels)) for _ in range(-(-count // len(labels)))]
    order = np.concatenate(epochs)[:count].reshape(parts, -1)
    return [(inputs[rows], labels[rows]) for rows in order]


def decoder(width, blocks):
    import keras
    from keras import layers

    tokens = keras.Input((LENGTH,), dtype="int32")
    places = keras.ops.arange(LENGTH, dtype="int32")
    x = layers.Embedding(BYTES, width)(tokens)
    x = x + layers.Embedding(LENGTH, width)(tokens * 0 + places)
    for _ in range(blocks):
        y = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(HEADS, width // HEADS)(y, y, use_causal_mask=True)
        y = layers.LayerNormalization()(x)
        x = x + layers.Dense(width)(layers.Dense(4 * width, "gelu")(y))
    return keras.Model(tokens, layers.Dense(BYTES)(layers.LayerNormalization()(x)))


def convolutional():
    import keras
    from keras import layers

    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(32, 3, padding="same", use_bias=False),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.Conv2D(64, 3, use_bias=False),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.GlobalAveragePooling2D(),
            layers.Dense(10),
        ]
    )


DATA = {"text": text, "images": images}


# --- what came out ---------------------------------------------------------------------------


def report(options, before, known):
    out = ["# Validation loss with local steps", surroundings(before)]
    parts = len(next(iter(known.values())))
    out.append(
        f"Means of {options.seeds} seeds after {parts * STEPS} steps, {options.backend}, "
        f"{options.dtype}.\n"
    )
    rows, body = [], []
    for name in options.tasks:
        for ranks in options.ranks:
            base, others = None, []
            for steps, outer in contenders(options):
                keys = [key_of(name, ranks, steps, outer, s) for s in range(options.seeds)]
                ends = [known[key][-1] for key in keys]
                mean = statistics.mean(ends)
                base = mean if base is None else base
                spread = f" ± {statistics.stdev(ends):.3f}" if len(ends) > 1 else ""
                others.append(f"{mean:.3f}{spread} ({mean / base - 1:+.1%})")
                if steps == DEFAULT and outer == "default":
                    what = f"{TITLES[name]}, {ranks} ranks: the default, above {SYNCHRONOUS}"
                    more = mean / base - 1
                    rows.append((what, f"<= {LOSES:.0%}", f"{more:.1%}", more <= LOSES))
            body.append([f"{TITLES[name]}, {ranks} ranks", *others])
    out.append(tabulated(["", *map(title, contenders(options))], body))
    plot(options, known, options.output / f"{name_of(options)}.png")
    conclude(options.output, name_of(options), out, rows)


def title(contender):
    steps, outer = contender
    if not steps:
        return SYNCHRONOUS
    return f"H = {steps}" + {"default": "", "none": ", averages"}.get(outer, f", SGD({outer})")


def plot(options, known, path):
    pyplot = plotter()
    if pyplot is None:
        return
    shape = len(options.tasks), len(options.ranks)
    size = 4 * shape[1], 3 * shape[0]
    figure, axes = pyplot.subplots(*shape, figsize=size, squeeze=False, sharey="row")
    for row, name in zip(axes, options.tasks, strict=True):
        for axis, ranks in zip(row, options.ranks, strict=True):
            for contender in contenders(options):
                keys = [key_of(name, ranks, *contender, s) for s in range(options.seeds)]
                losses = np.mean([known[key] for key in keys], 0)
                steps = STEPS * np.arange(1, len(losses) + 1)
                axis.plot(steps, losses, label=title(contender), marker=".")
            axis.set(title=f"{TITLES[name]}, {ranks} ranks", xlabel="steps")
        row[0].set_ylabel("validation loss")
        if name == "images":
            row[0].set_yscale("log")
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    print(f"written: {path}")


if __name__ == "__main__":
    main()
