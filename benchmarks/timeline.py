"""Measures what recording a timeline costs in a fit of a small network.

    python benchmarks/timeline.py [--backend tensorflow|jax|torch] [--ranks 2] [--quick]

It starts its own ranks. Within one fit recording is switched on and off from step to step, so that
what else the machine does falls on both alike; the medians of thousands of steps are compared. A
small network is the worst case: what is recorded is of the same size in every step. What a step
records, written included, is also repeated by itself, and its time of the processor compared with
that of a step.
"""

import json
import os
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
from common import answer, conclude, load, options_of, parser, slug, start, surroundings, table
from ranks import everyones

BATCH = 32
WARM_STEPS = 100
FEATURES, WIDTH, CLASSES = 64, 256, 10
BOUND = 0.01
CONTENDERS = ["without", "with"]
ORDER = [0, 1, 1, 0]  # so that a machine that becomes slower falls on both alike


def main():
    made = parser(__doc__, quick="fewer rounds")
    made.add_argument("--backend", choices=["tensorflow", "jax", "torch"], default="tensorflow")
    made.add_argument("--ranks", type=int, default=2)
    options = options_of(made, work)
    os.environ["KERAS_BACKEND"] = options.backend
    before = load()
    task = {"steps": 2_000 if options.quick else 16_000}
    report(options, before, start(__file__, options.ranks, task))


# --- on every rank ---------------------------------------------------------------------------


def work(path):
    import keras_dist

    task = json.loads(Path(path).read_text())
    keras_dist.init()
    model, steps = small_network(), WARM_STEPS + task["steps"]
    random = np.random.default_rng(keras_dist.rank())
    x = random.random((steps * BATCH, FEATURES), np.float32)
    y = random.integers(0, CLASSES, steps * BATCH)
    with tempfile.TemporaryDirectory() as directory:
        keras_dist.start_timeline(Path(directory, "t.json"), mbytes=1000)
        switch = make_switch()
        model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[switch])
        keras_dist.stop_timeline()
    ranks = np.array(everyones(np.diff(switch.times, axis=0).tolist()))
    milliseconds = ranks.mean(axis=0)[WARM_STEPS:] * 1e3
    if keras_dist.rank() == 0:
        found = {"alone": min(recording_alone() for _ in range(5))}
        for place, kind in enumerate(["wall", "cpu"]):
            turns = milliseconds[:, place].reshape(-1, len(ORDER))
            found[kind] = {
                name: float(np.median(turns[:, np.equal(ORDER, number)]))
                for number, name in enumerate(CONTENDERS)
            }
        answer(path, found)


def make_switch():
    """Returns a callback that switches recording, and takes the times when it does."""
    import keras

    from keras_dist._engine.tracing import spans

    recorder = spans.recorder

    class Switch(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.times = []
            self.take()

        def on_train_batch_end(self, batch, logs=None):
            float(logs["loss"])  # JAX is ahead of its results
            self.take()

        def on_train_end(self, logs=None):
            spans.recorder = recorder

        def take(self):
            step = len(self.times)
            self.times.append([time.perf_counter(), time.process_time()])
            spans.recorder = recorder if ORDER[(step - WARM_STEPS) % len(ORDER)] else None

    return Switch()


def recording_alone(count=5000):
    """Returns the milliseconds of the processor that it takes to record a step and to write it."""
    from keras_dist import _engine
    from keras_dist._engine.tracing import spans, trace_writer

    lock, spent = threading.RLock(), []
    gradients = _engine.entries_of(["kernel", "bias"] * 2, [((64, 256), np.dtype("f4"))] * 4)
    call = _engine.CollectiveSignature("the reduction of gradients", gradients)
    for records in (True, False):
        with tempfile.TemporaryDirectory() as directory:
            if records:
                trace_writer.start_trace(f"{directory}/part", {"rank": 0}, (0, 10**9), 10**9)
            recorder = spans.recorder
            lane = spans.Lane("communication", recorder) if records else None
            began = time.process_time()
            for number in range(count):
                with (
                    spans.step(1),
                    spans.RecordedLock(lane, lock) if records else lock,
                ):
                    with spans.phase("copy in"):
                        pass
                    with spans.rendezvous(call, number):
                        pass
                    with spans.phase("reduce"):
                        pass
                    with spans.phase("wait for slices"):
                        pass
            trace_writer.stop_trace()
            spent.append((time.process_time() - began) / count * 1e3)
    return spent[0] - spent[1]


def small_network():
    import keras

    import keras_dist

    keras.utils.set_random_seed(0)
    layers = [keras.Input((FEATURES,)), keras.layers.Dense(WIDTH, "relu")]
    model = keras.Sequential([*layers, keras.layers.Dense(CLASSES)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras_dist.DistributedOptimizer(keras.optimizers.SGD(0.01)), loss)
    return model


# --- what came out ---------------------------------------------------------------------------


def report(options, before, found):
    text = [f"# A timeline of a small network, {options.backend}, {options.ranks} ranks"]
    text.append(surroundings(before))
    body, shares = [], {}
    for kind, what in (("wall", "a step"), ("cpu", "the processors in a step")):
        medians = found[kind]
        shares[what] = medians["with"] / medians["without"] - 1
        body.append(
            [what, *(f"{medians[name]:.3f} ms" for name in CONTENDERS), f"{shares[what]:+.2%}"]
        )
    text.append(table(["time of", *CONTENDERS, "more"], body))
    shares["the processor, recording alone"] = found["alone"] / found["cpu"]["without"]
    more = found["wall"]["with"] - found["wall"]["without"]
    text.append(
        f"\nThat is {more * 1e3:.0f} us a step, under {BOUND:.0%} of those that take "
        f"{max(more, 0) / BOUND:.1f} ms or more."
    )
    text.append(f"\nRecording a step, by itself: {found['alone'] * 1e3:.1f} us of the processor.")
    rows = [
        (f"more time, with a timeline: {what}", f"< {BOUND:.0%}", f"{share:+.2%}", share < BOUND)
        for what, share in shares.items()
    ]
    conclude(options.output, slug(f"timeline_{options.backend}"), text, rows)


if __name__ == "__main__":
    main()
