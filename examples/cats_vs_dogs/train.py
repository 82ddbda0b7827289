"""Trains a network to tell cats from dogs, on any number of ranks.

    keras-dist run -np 2 python examples/cats_vs_dogs/train.py --out results

What makes it run on many ranks is marked with a number; the rest is plain Keras. The notebook
beside it does the same step by step.
"""

import argparse
from pathlib import Path

import figures
import keras
import matplotlib.pyplot as plt
import pandas as pd
from images import find_images
from network import make_network
from pipeline import batches, prediction_map, split
from predictions import predict, summary

import keras_dist


def main():
    args = arguments()
    plt.switch_backend("agg")  # figures go to files
    keras_dist.init()  # 1. join the other ranks, take a GPU, before the first model
    keras.utils.set_random_seed(42)

    files, source = find_images(args.data, args.drawings)
    rows, test_rows = split(prediction_map(files))
    # 2. each rank its part of the files
    train = batches(rows, args.image_size, args.batch_size, training=True)
    test = batches(test_rows, args.image_size, 64)

    # 3. n ranks take steps of n batches: scale the learning rate
    rate = args.lr * keras_dist.size()
    # 4. average the gradients
    optimizer = keras_dist.DistributedOptimizer(keras.optimizers.SGD(rate, momentum=0.9))
    model = make_network(args.network, args.image_size)
    model.compile(optimizer, "binary_crossentropy", metrics=["accuracy"])

    # 5. equal weights at the start, metrics of all ranks, one progress bar, one checkpoint
    calmer = keras_dist.callbacks.LearningRateScheduleCallback(
        rate, 0.1, start_epoch=round(args.epochs * 0.75)
    )
    callbacks = keras_dist.callbacks(
        calmer,
        warmup_epochs=args.warmup_epochs,
        initial_lr=rate,
        checkpoint=None if args.out is None else str(args.out / "cats_vs_dogs.keras"),
        throughput=True,
    )
    history = model.fit(
        train, validation_data=test, epochs=args.epochs, callbacks=callbacks, verbose=2
    )

    # 6. each rank predicts its share, and all have the whole table
    predictions = predict(model, test_rows, args.image_size)
    keras_dist.verify_replicas(model)  # raises an error that names what differs
    if keras_dist.rank() == 0:
        report(
            pd.DataFrame(history.history),
            predictions,
            f"{model.name} network on {source}",
            args.out,
        )


def report(history, predictions, trained, out):
    """Prints how good the network is, and writes tables and figures where that is wanted."""
    print(summary(predictions))
    if out is not None:
        history.to_csv(out / "history.csv", index_label="epoch")
        predictions.to_csv(out / "predictions.csv", index=False)
        figures.learning_curves(history).savefig(out / "learning_curves.png")
        figures.confusion(predictions).savefig(out / "confusion.png")
        figures.prediction_grid(predictions).savefig(out / "predictions.png")
        print(f"Tables, figures and the model are in {out}.\n")
    accuracy = (predictions.predicted == predictions.category).mean()
    ranks = f"{keras_dist.size()} rank{'s' if keras_dist.size() > 1 else ''}"
    print(
        f"Trained the {trained} with {ranks}: "
        f"{history.samples_per_second.median():,.0f} images/s in total, "
        f"validation accuracy {accuracy:.1%}, all replicas are equal."
    )


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--data",
        default="auto",
        help="directory or zip archive of cat.N.jpg and dog.N.jpg; drawings; or auto: Microsoft's "
        "public archive (825 MB) where it can be downloaded, else drawings (auto)",
    )
    parser.add_argument("--drawings", type=int, default=3000, help="how many are drawn (3000)")
    parser.add_argument("--network", choices=("small", "mobilenet"), default="small")
    parser.add_argument("--image-size", type=int, default=64, help="pixels of both sides (64)")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=16, help="images per rank and step (16)")
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate for one rank (0.02)")
    parser.add_argument("--warmup-epochs", type=float, default=1)
    parser.add_argument("--out", type=Path, help="directory for model, tables and figures")
    parser.add_argument("--smoke", action="store_true", help="200 small drawings, 2 epochs")
    if parser.parse_known_args()[0].smoke:
        parser.set_defaults(data="drawings", drawings=200, image_size=32, epochs=2)
    args = parser.parse_args()
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
    return args


if __name__ == "__main__":
    main()
