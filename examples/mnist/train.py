"""Trains a network on handwritten digits, on any number of ranks.

    mpirun -np 2 python examples/mnist/train.py

What makes it run on many ranks is marked with a number; the rest is plain Keras.
"""

import argparse

import keras
from digits import load_digits
from network import Clock, make_network
from options import positive

import keras_dist


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=positive, default=8)
    parser.add_argument("--batch-size", type=positive, default=64, help="images per rank and step")
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate for one rank")
    parser.add_argument("--warmup-epochs", type=float, default=1)
    parser.add_argument("--checkpoint", help="file to write after each epoch, such as mnist.keras")
    args = parser.parse_args()

    keras_dist.init()  # 1. join the other ranks, take a GPU, before the first model
    keras.utils.set_random_seed(42)
    (x_train, y_train), (x_test, y_test), source = load_digits()

    # 2. each rank its part of the data
    train = keras_dist.data.shard((x_train, y_train), batch_size=args.batch_size, seed=42)
    test = keras_dist.data.shard((x_test, y_test), batch_size=256, shuffle=False)

    # 3. n ranks take steps of n batches: scale the learning rate
    rate = args.lr * keras_dist.size()
    # 4. average the gradients
    optimizer = keras_dist.DistributedOptimizer(keras.optimizers.SGD(rate, momentum=0.9))
    model = make_network(x_train.shape[1:])
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])

    # 5. equal weights at the start, metrics of all ranks, one progress bar, one checkpoint
    clock = Clock()
    callbacks = keras_dist.callbacks(
        clock, warmup_epochs=args.warmup_epochs, initial_lr=rate, checkpoint=args.checkpoint
    )
    model.fit(train, validation_data=test, epochs=args.epochs, callbacks=callbacks)

    result = model.evaluate(test, callbacks=keras_dist.callbacks(), return_dict=True, verbose=0)
    keras_dist.verify_replicas(model)  # raises an error that names what differs
    if keras_dist.rank() == 0:
        ranks = f"{keras_dist.size()} rank{'s' if keras_dist.size() > 1 else ''}"
        print(
            f"\nTrained on {source} with {ranks}: "
            f"{clock.images_per_second(len(x_train)):,.0f} images/s in total, "
            f"test accuracy {result['accuracy']:.1%}, all replicas are equal."
        )


if __name__ == "__main__":
    main()
