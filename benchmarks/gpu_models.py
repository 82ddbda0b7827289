"""Models, data and timing of the proof on GPUs."""

import os
import statistics
import time

import numpy as np


def small():
    """Returns whether there is no GPU."""
    return bool(os.environ.get("GPU_PROOF_SMALL"))


def device():
    return "cpu" if small() else "cuda"


def synchronize():
    """Waits for the work of the GPU."""
    if not small():
        import torch

        torch.cuda.synchronize()


def time_in_turn(ways, run, rounds, world, steps):
    """Returns the median milliseconds of a step for each way; `run` takes a way."""
    times = {way: [] for way in ways}
    for number in range(rounds):
        for way in list(ways)[:: 1 if number % 2 else -1]:
            finish()
            world.Barrier()
            begin = time.perf_counter()
            run(way)
            finish()
            world.Barrier()
            times[way].append(1e3 * (time.perf_counter() - begin) / steps)
    return {way: statistics.median(each) for way, each in times.items()}


def finish():
    if os.environ["KERAS_BACKEND"] == "torch":
        synchronize()


def ResNet50():
    """Returns a torch model, its batch, side, classes, and the steps between two measurements."""
    import torch

    if small():
        nn = torch.nn
        layers = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        return nn.Sequential(*layers, nn.Linear(8, 10)), 4, 16, 10, 2
    try:
        import torchvision
    except ImportError:
        return residual_network(), 64, 224, 1000, 8
    return torchvision.models.resnet50(), 64, 224, 1000, 8


def residual_network():
    """Returns a network with the sizes of ResNet-50."""
    import torch

    nn = torch.nn

    class Block(nn.Module):
        def __init__(self, before, width, stride):
            super().__init__()
            after = 4 * width

            def normalized(*args, **options):
                return [nn.Conv2d(*args, bias=False, **options), nn.BatchNorm2d(args[1])]

            self.way = nn.Sequential(
                *normalized(before, width, 1),
                nn.ReLU(),
                *normalized(width, width, 3, stride=stride, padding=1),
                nn.ReLU(),
                *normalized(width, after, 1),
            )
            same = before == after and stride == 1
            short = (
                nn.Identity()
                if same
                else nn.Sequential(*normalized(before, after, 1, stride=stride))
            )
            self.short = short

        def forward(self, x):
            return torch.relu(self.way(x) + self.short(x))

    layers = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, 1))
    before = 64
    for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for number in range(count):
            layers.append(Block(before, width, 1 if number else stride))
            before = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))


def data(steps):
    """Returns images and classes of a rank, and the batch."""
    import keras_dist

    side, batch = (16, 8) if small() else (64, 128)
    random = np.random.default_rng(keras_dist.rank())
    x = random.normal(size=(batch * steps, side, side, 3)).astype("f4")
    return x, random.integers(0, 10, batch * steps), batch


def keras_model(wraps):
    """Returns a compiled convolutional network in mixed bfloat16."""
    import keras

    import keras_dist

    keras.config.set_dtype_policy("mixed_bfloat16")
    keras.utils.set_random_seed(0)
    layers, side = keras.layers, 16 if small() else 64
    stack = [keras.Input((side, side, 3))]
    for filters in (8, 16) if small() else (64, 128, 256):
        stack += [
            layers.Conv2D(filters, 3, padding="same", use_bias=False),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.MaxPooling2D(),
        ]
    model = keras.Sequential(
        [*stack, layers.Flatten(), layers.Dense(512, "relu"), layers.Dense(10)]
    )
    optimizer = keras.optimizers.Adam(1e-3)
    model.compile(
        keras_dist.DistributedOptimizer(optimizer) if wraps else optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model
