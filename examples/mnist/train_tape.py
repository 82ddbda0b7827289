"""Trains the network of train.py with a loop written for Horovod: only the import has changed.

mpirun -np 2 python examples/mnist/train_tape.py
"""

import argparse
import time

import keras
import tensorflow as tf
from digits import load_digits
from network import make_network
from options import positive

import keras_dist.tensorflow as hvd


def make_parser():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch_size", type=positive, default=64, help="images per rank and step")
    parser.add_argument("--epochs", type=positive, default=8)
    parser.add_argument("--lr", type=float, default=0.001, help="learning rate for one rank")
    parser.add_argument("--device", choices=["cpu", "gpu"], default="gpu", help="gpu: if any")
    parser.add_argument("--num_inter", type=int, default=0, help="threads between operations")
    parser.add_argument("--num_intra", type=int, default=0, help="threads within one")
    parser.add_argument("--warmup_epochs", type=float, default=1, help="epochs up to the full rate")
    parser.add_argument("--fp16-allreduce", action="store_true", help="float16 between nodes")
    parser.add_argument("--checkpoint_dir", help="where rank 0 writes after each epoch")
    return parser


def take_device(args):
    """Chooses threads and GPU before TensorFlow runs, then joins the other ranks."""
    if args.num_inter:
        tf.config.threading.set_inter_op_parallelism_threads(args.num_inter)
    if args.num_intra:
        tf.config.threading.set_intra_op_parallelism_threads(args.num_intra)
    if args.device == "cpu":
        tf.config.set_visible_devices([], "GPU")
    hvd.init()


def tensor_average(value, name):
    """Returns a number averaged over the ranks."""
    return float(hvd.allreduce(tf.constant(value), name=name))


def main():
    parser = make_parser()
    args = parser.parse_args()
    take_device(args)
    keras.utils.set_random_seed(42 + hvd.rank())
    (x_train, y_train), (x_test, y_test), source = load_digits()
    steps = len(x_train) // hvd.size() // args.batch_size
    if steps < 1:
        share = len(x_train) // hvd.size()
        parser.error(f"--batch_size {args.batch_size} is more than the {share} images of a rank")
    dataset = tf.data.Dataset.from_tensor_slices((x_train, y_train))
    dataset = dataset.shard(num_shards=hvd.size(), index=hvd.rank())
    dataset = dataset.shuffle(10_000).batch(args.batch_size).take(steps)

    model = make_network(x_train.shape[1:])
    optimizer = tf.optimizers.Adam(args.lr)
    loss_of = keras.losses.SparseCategoricalCrossentropy()
    compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)

    @tf.function
    def train_step(x, y, first_batch):
        with tf.GradientTape() as tape:
            guesses = model(x, training=True)
            loss = loss_of(y, guesses)
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        if first_batch:
            hvd.broadcast_variables(model.weights, root_rank=0)
            hvd.broadcast_variables(optimizer.variables, root_rank=0)
        return loss, tf.reduce_mean(keras.metrics.sparse_categorical_accuracy(y, guesses))

    def rate_at(step):
        """The rate rises from that of one rank to that of all."""
        progress = (step + 1) / max(1, args.warmup_epochs * steps)
        return args.lr * (1 + (hvd.size() - 1) * min(1.0, progress))

    for epoch in range(args.epochs):
        start, results = time.perf_counter(), []
        for number, (x, y) in enumerate(dataset):
            optimizer.learning_rate = rate_at(epoch * steps + number)
            results.append(train_step(x, y, epoch == number == 0))
        loss, accuracy = (sum(map(float, one)) / steps for one in zip(*results, strict=True))
        loss, accuracy = tensor_average(loss, "loss"), tensor_average(accuracy, "accuracy")
        speed = steps * args.batch_size * hvd.size() / (time.perf_counter() - start)
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1}: loss {loss:.4f}, accuracy {accuracy:.1%}, {speed:,.0f}/s")
        if hvd.rank() == 0 and args.checkpoint_dir:
            checkpoint.save(f"{args.checkpoint_dir}/epoch")

    # Each rank tests its part.
    mine = slice(hvd.rank(), None, hvd.size())
    guesses = model.predict(x_test[mine], verbose=0).argmax(axis=1)
    right = hvd.allreduce((guesses == y_test[mine]).sum(), op=hvd.Sum)
    if hvd.rank() == 0:
        ranks = f"{hvd.size()} rank{'s' if hvd.size() > 1 else ''}"
        print(f"\nTrained on {source} with {ranks}: test accuracy {int(right) / len(y_test):.1%}.")


if __name__ == "__main__":
    main()
