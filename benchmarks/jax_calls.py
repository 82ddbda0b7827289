"""Times collectives of keras_dist.jax, out of jax.jit and in it, beside what a callback costs.

    python benchmarks/jax_calls.py [--ranks 2] [--quick]

It starts its own ranks. The contenders take turns; a time is that of the slowest rank. Inside of
`jax.jit` a collective is a call of the host, in place and in program order. "io_callback" is the
same collective in an ordered `io_callback` of JAX, which copies, as keras_dist did before;
"callback alone" is one that gives back what it is given.
"""

import json
import os
import statistics
from pathlib import Path

import numpy as np
from common import (
    MIB,
    answer,
    conclude,
    load,
    options_of,
    parser,
    ratio,
    slug,
    start,
    surroundings,
    table,
)
from ranks import time_calls

SIZES = {"4 KiB": 4096, "64 KiB": 65_536, "4 MiB": 4 * MIB}
WAYS = ["numpy", "out of jit", "in jit", "io_callback", "callback alone"]
BOUNDS = {"4 KiB": 0.15, "4 MiB": 1.0}  # milliseconds in jit


def main():
    made = parser(__doc__)
    made.add_argument("--ranks", type=int, default=2)
    options = options_of(made, work)
    os.environ["KERAS_BACKEND"] = "jax"
    before = load()
    rounds = 5 if options.quick else 25
    report(options, before, start(__file__, options.ranks, {"rounds": rounds}))


# --- on every rank ---------------------------------------------------------------------------


def work(path):
    import jax
    from jax.experimental import io_callback

    import keras_dist
    import keras_dist.jax as hvd

    task = json.loads(Path(path).read_text())
    hvd.init()

    def in_callback(function):
        def call(x):
            spec = jax.ShapeDtypeStruct(x.shape, x.dtype)
            return io_callback(lambda x: function(np.asarray(x)), spec, x, ordered=True)

        return jax.jit(call)

    copying, alone = in_callback(keras_dist.allreduce), in_callback(lambda x: x)

    inside = jax.jit(hvd.allreduce)
    found = {}
    for name, nbytes in SIZES.items():
        x = np.ones(nbytes // 4, "float32")
        given = jax.numpy.asarray(x)
        calls = {
            "numpy": lambda x=x: keras_dist.allreduce(x),
            "out of jit": lambda x=given: hvd.allreduce(x).block_until_ready(),
            "in jit": lambda x=given: inside(x).block_until_ready(),
            "io_callback": lambda x=given: copying(x).block_until_ready(),
            "callback alone": lambda x=given: alone(x).block_until_ready(),
        }
        found[name] = time_calls(calls, task["rounds"])
    if hvd.rank() == 0:
        answer(path, found)


# --- what came out ---------------------------------------------------------------------------


def report(options, before, found):
    text = [f"# keras_dist.jax, allreduce, {options.ranks} ranks", surroundings(before)]
    for label, of in (("median", statistics.median), ("least", min)):
        rows = [[name, *(f"{of(found[name][way]):.3f}" for way in WAYS)] for name in SIZES]
        text += [table([f"ms, {label}", *WAYS], rows), ""]
    verdicts = []
    for name, bound in BOUNDS.items():
        least = min(found[name]["in jit"])
        verdicts.append((f"{name} in jit", f"<= {bound} ms", f"{least:.3f} ms", least <= bound))
    for name in SIZES:
        faster = ratio(found[name]["io_callback"], found[name]["in jit"])
        verdicts.append(
            (f"{name} in jit, against io_callback", "> 1 x faster", f"{faster:.2f} x", faster > 1)
        )
    conclude(options.output, slug("jax_calls"), text, verdicts)


if __name__ == "__main__":
    main()
