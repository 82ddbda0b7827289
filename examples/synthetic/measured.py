"""What both benchmarks share: their options, and how images a second are measured and said."""

import argparse
import time

import numpy as np


def positive(text):
    """Returns a whole number of 1 or more."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return int(text)


def parser(doc, model, models, image_size):
    """Returns a parser of the options that scripts for Horovod know."""
    made = argparse.ArgumentParser(description=doc.splitlines()[0])
    made.add_argument("--model", default=model, help=models)
    made.add_argument("--batch-size", type=positive, default=32, help="images per rank and step")
    made.add_argument(
        "--image-size", type=positive, default=image_size, help="their height and width"
    )
    made.add_argument("--num-warmup-batches", type=int, default=10)
    made.add_argument("--num-batches-per-iter", type=positive, default=10)
    made.add_argument("--num-iters", type=positive, default=10)
    made.add_argument("--fp16-allreduce", action="store_true", help="float16 between nodes")
    return made


def measure(hvd, args, parameters, train):
    """Prints the images a second of each iteration, and their mean on a rank and on all.

    Args:
        hvd: the module of keras_dist that trains.
        args: the options.
        parameters: how many the model has.
        train: trains on a number of batches, to the end of the last.
    """

    def say(text):
        if hvd.rank() == 0:
            print(text, flush=True)

    say(f"Model: {args.model}, {parameters:,} parameters, on {hvd.size()} ranks")
    train(args.num_warmup_batches)
    speeds = []
    for number in range(args.num_iters):
        start = time.perf_counter()
        train(args.num_batches_per_iter)
        images = args.batch_size * args.num_batches_per_iter
        speeds.append(images / (time.perf_counter() - start))
        say(f"Iter #{number}: {speeds[-1]:.1f} img/sec per rank")
    mean, deviation = np.mean(speeds), 1.96 * np.std(speeds)
    everyones = np.sum(hvd.allgather_object((mean, deviation)), axis=0)
    say(f"Img/sec per rank: {mean:.1f} +-{deviation:.1f}")
    say(f"Total img/sec on {hvd.size()} ranks: {everyones[0]:.1f} +-{everyones[1]:.1f}")
