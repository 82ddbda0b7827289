"""Trains the network of train.py with a loop written by hand.

    mpirun -np 2 python examples/mnist/train_custom_loop.py

Gradients come out of TensorFlow, are averaged by `keras_dist.grouped_allreduce`, which takes
and gives numpy arrays, and go back into TensorFlow.
"""

import argparse
import time

import keras
import tensorflow as tf
from digits import load_digits
from network import make_network
from options import positive

import keras_dist


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=positive, default=8)
    parser.add_argument("--batch-size", type=positive, default=64, help="images per rank and step")
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate for one rank")
    args = parser.parse_args()

    keras_dist.init()
    keras.utils.set_random_seed(42)
    (x_train, y_train), (x_test, y_test), source = load_digits()
    images = tf.data.Dataset.from_tensor_slices((x_train, y_train))
    train = keras_dist.data.shard(images, batch_size=args.batch_size, seed=42)

    model = make_network(x_train.shape[1:])
    optimizer = keras.optimizers.SGD(args.lr * keras_dist.size(), momentum=0.9)
    optimizer.build(model.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy()

    @tf.function
    def gradients_of(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        return loss, tape.gradient(loss, model.trainable_variables)

    @tf.function
    def apply(gradients):
        optimizer.apply(gradients, model.trainable_variables)

    # Every rank starts from the weights of rank 0.
    for weight in model.weights:
        weight.assign(keras_dist.broadcast(weight.numpy()))

    for epoch in range(args.epochs):
        start, losses = time.perf_counter(), []
        for x, y in train:
            loss, gradients = gradients_of(x, y)
            averaged = keras_dist.grouped_allreduce([g.numpy() for g in gradients])
            apply([tf.constant(gradient) for gradient in averaged])
            losses.append(float(loss))
        loss = keras_dist.allreduce(sum(losses) / len(losses))
        seconds = time.perf_counter() - start
        if keras_dist.rank() == 0:
            print(f"epoch {epoch + 1}: loss {loss:.4f}, {len(x_train) / seconds:,.0f} images/s")

    # Each rank tests its part; the sums of all ranks give the accuracy of the whole.
    mine = slice(keras_dist.rank(), None, keras_dist.size())
    guesses = model.predict(x_test[mine], verbose=0).argmax(axis=1)
    right = keras_dist.allreduce((guesses == y_test[mine]).sum(), op=keras_dist.Sum)
    keras_dist.verify_replicas(model)
    if keras_dist.rank() == 0:
        print(
            f"\nTrained on {source} with {keras_dist.size()} ranks: "
            f"test accuracy {right / len(y_test):.1%}, all replicas are equal."
        )


if __name__ == "__main__":
    main()
