"""Trains a network on random images and says how many a second: on each rank, and on all.

mpirun -np 2 python examples/synthetic/tensorflow_benchmark.py --model ResNet50 --batch-size 32
"""

import keras
import tensorflow as tf
from measured import measure, parser

import keras_dist.tensorflow as hvd


def parse_arguments():
    options = parser(__doc__, "ResNet50", "one of keras.applications, or MLP", 224)
    args = options.parse_args()
    if args.model != "MLP" and not callable(getattr(keras.applications, args.model, None)):
        options.error(f"--model {args.model}: keras.applications has no such network")
    return args


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

    def train(batches):
        for _ in range(batches):
            float(step(first_batch=False))

    step(first_batch=True)
    measure(hvd, args, model.count_params(), train)


if __name__ == "__main__":
    main()
