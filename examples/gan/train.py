"""Trains a GAN on handwritten digits, on any number of ranks.

    mpirun -np 2 python examples/gan/train.py

What makes it run on many ranks is marked with a number; the rest is plain Keras.
"""

import argparse
import sys
from pathlib import Path

import keras
from gan import Gan

import keras_dist

sys.path.append(str(Path(__file__).parents[1] / "mnist"))
from digits import load_digits


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64, help="images per rank and step")
    parser.add_argument("--lr", type=float, default=0.0005, help="learning rate for one rank")
    args = parser.parse_args()

    keras_dist.init()  # 1. join the other ranks, take a GPU, before the first model
    keras.utils.set_random_seed(42)
    (images, _), _, source = load_digits()

    # 2. each rank its part of the data
    train = keras_dist.data.shard(images, batch_size=args.batch_size, seed=42)

    # 3. n ranks take steps of n batches: scale the learning rate
    rate = args.lr * keras_dist.size()
    # 4. average the gradients, of each network by its own optimizer
    for_maker, for_judge = (
        keras_dist.DistributedOptimizer(keras.optimizers.Adam(rate, beta_1=0.5)) for _ in range(2)
    )
    gan = Gan(images.shape[1:])
    gan.compile(for_maker, for_judge)

    # 5. equal weights at the start, another stream of noise on each rank, losses of all ranks
    history = gan.fit(train, epochs=args.epochs, callbacks=keras_dist.callbacks()).history

    keras_dist.verify_replicas(gan)  # both networks and both optimizers
    if keras_dist.rank() == 0:
        ranks = f"{keras_dist.size()} rank{'s' if keras_dist.size() > 1 else ''}"
        print(
            f"\nTrained a GAN on {source} with {ranks}: "
            f"judge loss {history['judge_loss'][-1]:.3f}, "
            f"maker loss {history['maker_loss'][-1]:.3f}, all replicas are equal."
        )


if __name__ == "__main__":
    main()
