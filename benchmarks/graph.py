"""Times the gradients of a ResNet-50 on their way through a TensorFlow graph, on every rank."""

import time
from pathlib import Path

import numpy as np
from ranks import barrier, everyones
from turns import in_turn


def resnet_shapes():
    """Returns the shapes of a ResNet-50's gradients: 54 kernels, a bias, the norms by stage."""
    shapes = [(7, 7, 3, 64)]
    norms, width = [2 * 64], 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        inner, outer = 64 * 2**stage, 256 * 2**stage
        for block in range(blocks):
            if block == 0:
                shapes.append((1, 1, width, outer))
            shapes += [(1, 1, width, inner), (3, 3, inner, inner), (1, 1, inner, outer)]
            width = outer
        norms.append(2 * (blocks * (2 * inner + outer) + outer))
    return [*shapes, *((count,) for count in norms), (width, 1000), (1000,)]


def time_graph(rounds):
    """Returns milliseconds of reducing through a TensorFlow graph, and of one numpy copy."""
    import tensorflow as tf

    from keras_dist import _engine, runtime
    from keras_dist.ops import gradient_plans, reduction_options
    from keras_dist.training import gradient_reduction

    random = np.random.default_rng(runtime.rank())
    arrays = [random.random(shape, np.float32) for shape in resnet_shapes()]
    gradients = [tf.constant(array) for array in arrays]
    variables = [tf.Variable(tf.zeros(shape)) for shape in resnet_shapes()]
    reduce = gradient_reduction.GradientReduction(reduction_options.ReductionOptions())

    @tf.function(autograph=False)
    def step(gradients):
        # One number of each result, so that every result is there and none is copied.
        return tf.stack([tf.reshape(g, [-1])[0] for g in reduce(gradients, variables)])

    expected = np.mean(everyones([float(array.flat[0]) for array in arrays]), axis=0)
    if not np.allclose(step(gradients).numpy(), expected, rtol=1e-6):
        raise SystemExit(f"{runtime.where()} the graph is wrong")
    source = np.concatenate([array.reshape(-1) for array in arrays])
    target = np.zeros_like(source)
    plan = (
        runtime.communicator(),
        [str(number) for number in range(len(arrays))],
        [(array.shape, array.dtype) for array in arrays],
        _engine.OpOptions(),
        _engine.BucketOptions(gradient_plans.bucket_nbytes(), lend=True),
    )
    fused = _engine.FusedAllreduce(*plan)
    fused(arrays)
    before = own_memory()
    more = _engine.FusedAllreduce(*plan)
    more(arrays)
    memory = max(row[0] for row in everyones([own_memory() - before]))
    del more
    calls = {
        "graph": lambda: step(gradients).numpy(),
        "engine": lambda: fused(arrays),
        "copy": lambda: np.copyto(target, source),
    }

    def milliseconds(name):
        barrier()
        begin = time.perf_counter()
        calls[name]()
        return 1e3 * max(row[0] for row in everyones([time.perf_counter() - begin]))

    for name in calls:
        milliseconds(name)
    found = in_turn(calls, rounds, milliseconds)
    return {**found, "tensors": len(arrays), "nbytes": source.nbytes, "memory": memory}


def own_memory():
    """Returns the bytes of memory of this rank; what ranks share counts by its share."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
