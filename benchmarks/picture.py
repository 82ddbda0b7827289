"""Draws the picture of the README: images per second and loss, in one process and on several ranks.

    python benchmarks/picture.py [--backends tensorflow jax torch] [--quick]

It starts its own jobs: one process, and as many ranks as there are cores, in turn, each rank on a
core of its own. All train the CNN of `benchmarks/fit.py` as the README does, on the digits of
scikit-learn, with the same batch over all ranks. Of the first backend, the loss is also taken on
twice as many ranks as there are cores, where a speed would say nothing.
"""

import json
import os
import statistics
import time
from pathlib import Path

import numpy as np
from common import answer, conclude, load, options_of, parser, plotter, start, surroundings, table
from models import MODELS
from turns import in_turn

BACKENDS = {"tensorflow": "TensorFlow", "jax": "JAX", "torch": "torch"}
IMAGES, BATCH, EPOCHS = 512, 128, 8
RATE = 0.02
FASTER, DIFFERS = 0.75, 1e-3  # bounds: share of the ideal speed, relative difference of the loss
POINTS = {"textcoords": "offset points", "fontsize": 9}
STYLES = {
    "light": {"back": "#ffffff", "text": "#1f2328", "soft": "#8c959f", "full": "#2f6fd0"},
    "dark": {"back": "#0d1117", "text": "#e6edf3", "soft": "#7d8590", "full": "#58a6ff"},
}


def main():
    made = parser(__doc__, quick="one round, with fewer images and epochs")
    made.add_argument("--backends", nargs="+", choices=list(BACKENDS), default=list(BACKENDS))
    options = options_of(made, work)
    before, ranks = load(), max(2, len(os.sched_getaffinity(0)))
    epochs, images = (2, 2 * BATCH) if options.quick else (EPOCHS, IMAGES)
    task = {"epochs": epochs, "images": images}

    def job(backend):
        return lambda count: start(__file__, count, task, KERAS_BACKEND=backend)

    found, rounds = {}, 1 if options.quick else 2
    for backend in options.backends:
        print(backend, "...", flush=True)
        found[backend] = in_turn([0, ranks], rounds, job(backend))  # 0: without a launcher
    first = options.backends[0]
    found[first][2 * ranks] = [job(first)(2 * ranks)]
    draw(found, ranks, options.output)
    report(options, before, ranks, found)


# --- on every rank ---------------------------------------------------------------------------


def work(path):
    place = os.environ.get("MPI_LOCALRANKID") or os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK", "0")
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(place) % len(cores)]})  # before thread pools are made

    import keras

    import keras_dist

    keras_dist.init()
    task = json.loads(Path(path).read_text())
    size = BATCH // keras_dist.size()
    data = keras_dist.data.shard(
        digits(task["images"]), batch_size=size, shuffle="global"
    )  # for any ranks
    optimizer = keras_dist.DistributedOptimizer(keras.optimizers.SGD(RATE))
    model = MODELS["cnn"].compiled(optimizer)
    seconds = []

    class Clock(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.begin = time.perf_counter()

        def on_epoch_end(self, epoch, logs=None):
            seconds.append(time.perf_counter() - self.begin)

    callbacks = keras_dist.callbacks(Clock())
    losses = model.fit(data, epochs=task["epochs"], verbose=0, callbacks=callbacks).history["loss"]
    if keras_dist.rank() == 0:
        rate = task["images"] / statistics.median(seconds[1:])  # the first epoch compiles
        answer(path, {"rate": rate, "losses": losses})


def digits(count):
    """Returns some images of 28 x 28 with their digits."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images = np.kron(found.images[:count] / 16, np.ones((1, 3, 3)))
    return np.pad(images, [(0, 0), (2, 2), (2, 2)]).astype("float32"), found.target[:count]


# --- what came out ---------------------------------------------------------------------------


def rate(jobs):
    """Returns the images per second of some jobs."""
    return statistics.median(job["rate"] for job in jobs)


def losses(jobs):
    """Returns the loss of each epoch, which is the same in all of some jobs."""
    return np.array(jobs[0]["losses"])


def difference(found):
    """Returns the largest difference of a loss to that of one process, as a share of it."""
    one = losses(found[0])
    return max(float(np.max(abs(losses(jobs) / one - 1))) for jobs in found.values())


def report(options, before, ranks, found):
    text = ["# Speed and loss by number of ranks", surroundings(before)]
    rows, body = [], []
    for name, jobs in found.items():
        faster, differs = rate(jobs[ranks]) / rate(jobs[0]), difference(jobs)
        many = f"{rate(jobs[ranks]):.0f} ({faster:.2f})"
        body.append([BACKENDS[name], f"{rate(jobs[0]):.0f}", many, f"{differs:.0e}"])
        what, least = f"{BACKENDS[name]}: {ranks} ranks to one process", FASTER * ranks
        rows.append((what, f">= {least:.2f}", f"{faster:.2f}", faster >= least))
        what = f"{BACKENDS[name]}: a loss on several ranks to one process"
        rows.append((what, f"<= {DIFFERS:.0e}", f"{differs:.0e}", differs <= DIFFERS))
    head = ["images/s", "one process", f"{ranks} ranks", "largest difference of a loss"]
    conclude(options.output, "picture", [*text, table(head, body)], rows)


def draw(found, ranks, directory):
    """Draws the speed of each backend beside the ideal, and the loss of the first backend."""
    pyplot = plotter()
    texts = ["text.color", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color"]
    for name, style in STYLES.items() if pyplot else ():
        settings = {
            "axes.facecolor": style["back"],
            "savefig.facecolor": style["back"],
            **dict.fromkeys(texts, style["text"]),
            "axes.edgecolor": style["soft"],
            "axes.titlesize": 11,
            "axes.spines.top": False,
            "axes.spines.right": False,
            # Text remains text, and equal results are equal files.
            "svg.fonttype": "none",
            "svg.hashsalt": "picture",
        }
        with pyplot.rc_context(settings):
            figure, axes = pyplot.subplots(1, 2, figsize=(9, 2.8), layout="constrained")
            draw_speed(axes[0], style, found, ranks)
            draw_loss(axes[1], style, *next(iter(found.items())))
            path = directory / f"picture-{name}.svg"
            figure.savefig(path, metadata={"Date": None})
            pyplot.close(figure)
        print(f"drawn: {path}")


def draw_speed(axis, style, found, ranks):
    places, width = np.arange(len(found)), 0.36
    one = np.array([rate(jobs[0]) for jobs in found.values()])
    many = np.array([rate(jobs[ranks]) for jobs in found.values()])
    axis.bar(places - width / 2, one, 0.9 * width, color=style["soft"], label="one process")
    axis.bar(places + width / 2, many, 0.9 * width, color=style["full"], label=f"{ranks} ranks")
    ideal = {"fill": False, "linestyle": "--", "edgecolor": style["text"]}
    axis.bar(places + width / 2, ranks * one, 0.9 * width, label="ideal", **ideal)
    for place, ratio, top in zip(places, many / one, np.maximum(many, ranks * one), strict=True):
        axis.annotate(f"{ratio:.2f}x", (place + width / 2, top), (0, 3), ha="center", **POINTS)
    axis.set_xticks(places, [BACKENDS[name] for name in found])
    axis.set_ylim(0, 1.5 * ranks * max(one))
    axis.set(ylabel="images/s", title="the speed of fit, with a core for each rank")
    axis.legend(frameon=False, fontsize=9, ncols=2, loc="upper left")


def draw_loss(axis, style, backend, jobs):
    marks = iter([("o", 11, style["full"]), ("x", 6, style["text"])])
    epochs = np.arange(1, len(losses(jobs[0])) + 1)
    for ranks, found in jobs.items():
        if ranks == 0:
            axis.plot(epochs, losses(found), color=style["soft"], linewidth=3, label="one process")
            continue
        mark, size, colour = next(marks)
        look = {"color": colour, "markersize": size, "fillstyle": "none"}
        axis.plot(epochs, losses(found), mark, label=f"{ranks} ranks", **look)
    axis.set_xticks(epochs)
    axis.set(xlabel="epoch", ylabel="loss", ylim=(0, 1.1 * max(losses(jobs[0]))))
    axis.set_title(f"the loss, on {BACKENDS[backend]}")
    axis.legend(frameon=False, fontsize=9)


if __name__ == "__main__":
    main()
