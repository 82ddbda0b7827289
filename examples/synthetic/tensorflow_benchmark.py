"""Trains a network on random images and says how many a second: on each rank, and on all.

mpirun -np 2 python examples/synthetic/tensorflow_benchmark.py --model ResNet50 --batch-size 32
"""

import argparse
import time

import keras
import numpy as np
import tensorflow as tf

import keras_dist.tensorflow as hvd


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="ResNet50", help="one of keras.applications, or MLP")
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step")
    parser.add_argument("--image-size", type=int, default=224, help="their height and width")
    parser.add_argument("--num-warmup-batches", type=int, default=10)
    parser.add_argument("--num-batches-per-iter", type=int, default=10)
    parser.add_argument("--num-iters", type=int, default=10)
    parser.add_argument("--fp16-allreduce", action="store_true", help="float16 between nodes")
    return parser.parse_args()


def make_model(name, image_shape):
    if name != "MLP":
        make = getattr(keras.applications, name)
        return make(weights=None, input_shape=image_shape)
    layers = [keras.layers.Dense(2048, activation="relu") for _ in range(3)]
    last = keras.layers.Dense(1000, activation="softmax")
    return keras.Sequential([keras.Input(image_shape), keras.layers.Flatten(), *layers, last])


def main():
    args = parse_arguments()
    hvd.init()
    shape = (args.image_size, args.image_size, 3)
    model = make_model(args.model, shape)
    optimizer = tf.optimizers.SGD(0.01)
    loss_of = keras.losses.SparseCategoricalCrossentropy()
    compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
    images = tf.random.uniform([args.batch_size, *shape])
    labels = tf.random.uniform([args.batch_size], maxval=999, dtype=tf.int64)

    @tf.function
    def step(first_batch):
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        if first_batch:
            hvd.broadcast_variables(model.weights, root_rank=0)
            hvd.broadcast_variables(optimizer.variables, root_rank=0)
        return loss

    def seconds(batches):
        start = time.perf_counter()
        for _ in range(batches):
            float(step(first_batch=False))
        return time.perf_counter() - start

    def say(text):
        if hvd.rank() == 0:
            print(text, flush=True)

    say(f"Model: {args.model}, {model.count_params():,} parameters, on {hvd.size()} ranks")
    step(first_batch=True)
    seconds(args.num_warmup_batches)
    speeds = []
    for number in range(args.num_iters):
        images_each = args.batch_size * args.num_batches_per_iter
        speeds.append(images_each / seconds(args.num_batches_per_iter))
        say(f"Iter #{number}: {speeds[-1]:.1f} img/sec per rank")
    mean, deviation = np.mean(speeds), 1.96 * np.std(speeds)
    total = hvd.allreduce(tf.constant([mean, deviation]), op=hvd.Sum).numpy()
    say(f"Img/sec per rank: {mean:.1f} +-{deviation:.1f}")
    say(f"Total img/sec on {hvd.size()} ranks: {total[0]:.1f} +-{total[1]:.1f}")


if __name__ == "__main__":
    main()
