"""Trains a small residual network on CIFAR-10 with a loop written as for Horovod.

mpirun -np 2 python examples/cifar10/train.py

The loop is one for `horovod.tensorflow`; only its import is another one.
"""

import argparse
import math
import time

import keras
import tensorflow as tf
from pictures import load_pictures

import keras_dist.tensorflow as hvd


def positive(text):
    """Returns a whole number of 1 or more."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return int(text)


def make_parser():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--batch-size", "--batch_size", type=positive, default=64, help="per rank and step")
    add("--epochs", type=positive, default=20)
    add("--lr", type=float, default=0.05, help="learning rate for one rank")
    add("--warmup-epochs", "--warmup_epochs", type=float, default=2, help="the rate grows in these")
    add("--width", type=positive, default=16, help="channels of the first block")
    add("--fp16-allreduce", action="store_true", help="gradients as float16 between nodes")
    add("--cache", default="cifar10-cache", help="where the download is kept on each node")
    add("--made", type=positive, default=0, help="train on so many made pictures; no download")
    return parser


def make_network(width):
    """Three stages of residual blocks, whose batches are normalized over all ranks."""

    def convolve(x, channels, stride=1):
        x = keras.layers.Conv2D(channels, 3, stride, padding="same", use_bias=False)(x)
        return hvd.SyncBatchNormalization(momentum=0.9)(x)

    inputs = keras.Input((32, 32, 3))
    x = keras.layers.ReLU()(convolve(inputs, width))
    for channels in (width, 2 * width, 4 * width):
        stride = 1 if channels == width else 2
        y = convolve(keras.layers.ReLU()(convolve(x, channels, stride)), channels)
        shortcut = x if stride == 1 else keras.layers.Conv2D(channels, 1, stride)(x)
        x = keras.layers.ReLU()(y + shortcut)
    x = keras.layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, keras.layers.Dense(10)(x))


def moved(picture, label):
    """Returns a picture mirrored or not, and moved by up to four pixels."""
    picture = tf.image.random_flip_left_right(tf.pad(picture, [[4, 4], [4, 4], [0, 0]], "REFLECT"))
    return tf.image.random_crop(picture, [32, 32, 3]), label


def main():
    parser = make_parser()
    args = parser.parse_args()
    hvd.init()
    (x_train, y_train), (x_test, y_test), source = load_pictures(args.cache, args.made)
    keras.utils.set_random_seed(7 + hvd.rank())  # other flips and crops on each rank
    steps = len(x_train) // hvd.size() // args.batch_size
    if steps < 1 or len(x_test) < hvd.size():
        parser.error(
            f"{len(x_train)} pictures, and {len(x_test)} to test, are too few for {hvd.size()} "
            f"ranks and --batch-size {args.batch_size}"
        )
    dataset = tf.data.Dataset.from_tensor_slices((x_train, y_train))
    dataset = dataset.shard(hvd.size(), hvd.rank()).shuffle(10_000)
    dataset = dataset.map(moved, tf.data.AUTOTUNE).batch(args.batch_size).take(steps)

    model = make_network(args.width)
    compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
    optimizer = keras.optimizers.SGD(args.lr, momentum=0.9, nesterov=True, weight_decay=5e-4)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    hvd.broadcast_variables(model.weights, root_rank=0)

    @tf.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    def rate_at(step):
        """The rate rises to that of all ranks, then falls along a cosine."""
        progress = min(1.0, (step + 1) / max(1, args.warmup_epochs * steps))
        fall = (1 + math.cos(math.pi * step / (args.epochs * steps))) / 2
        return args.lr * (1 + (hvd.size() - 1) * progress) * fall

    for epoch in range(args.epochs):
        start, loss = time.perf_counter(), 0.0
        for number, (x, y) in enumerate(dataset):
            optimizer.learning_rate = rate_at(epoch * steps + number)
            loss += float(train_step(x, y)) / steps
        loss = float(hvd.allreduce(tf.constant(loss), name="loss"))
        speed = steps * args.batch_size * hvd.size() / (time.perf_counter() - start)
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1}: loss {loss:.4f}, {speed:,.0f} pictures/s")

    # Each rank tests its part.
    mine = slice(hvd.rank(), None, hvd.size())
    guesses = model.predict(x_test[mine], batch_size=256, verbose=0).argmax(axis=1)
    right = hvd.allreduce((guesses == y_test[mine]).sum(), op=hvd.Sum)
    if hvd.rank() == 0:
        accuracy = int(right) / len(y_test)
        print(f"\nTrained on {source} with {hvd.size()} ranks: test accuracy {accuracy:.1%}.")


if __name__ == "__main__":
    main()
