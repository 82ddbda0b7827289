"""Trains ResNet-50 on a tree of JPEG files and XML boxes, on any number of ranks.

keras-dist run -np 2 python examples/imagenet_style/train.py --smoke
"""

import argparse
import contextlib
import pathlib
import tempfile
import time

import keras
from tree import draw, images_in, reader

import keras_dist


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train", help="directory of <class>/<name>.JPEG")
    parser.add_argument("--boxes", help="directory of <class>/<name>.xml")
    parser.add_argument("--validation", help="as --train; by default there is none")
    parser.add_argument("--cache-dir", help="directory of each node to which the trees are copied")
    parser.add_argument("--epochs", type=int, default=90)
    parser.add_argument("--batch-size", type=int, default=128, help="images per rank and step")
    parser.add_argument("--side", type=int, default=224, help="height and width in pixels")
    parser.add_argument("--lr", type=float, default=1.0, help="learning rate for 256 images a step")
    parser.add_argument("--warmup-epochs", type=float, default=5)
    parser.add_argument("--policy", default="mixed_bfloat16", help="float32, mixed_float16, ...")
    parser.add_argument("--smoke", action="store_true", help="a small drawn tree, 2 epochs")
    args = parser.parse_args()
    if not (args.train or args.smoke):
        parser.error("pass --train or --smoke")

    keras_dist.init()
    keras.utils.set_random_seed(42)
    keras.mixed_precision.set_global_policy(args.policy)
    with drawn_tree(args) if args.smoke else contextlib.nullcontext():
        train(args)


@contextlib.contextmanager
def drawn_tree(args):
    """Draws a tree on the root and makes the arguments those of a run of seconds."""
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(keras_dist.broadcast_object(folder))
        args.train, args.boxes = folder / "train", folder / "boxes"
        args.epochs, args.batch_size, args.side, args.warmup_epochs = 2, 8, 32, 1
        if keras_dist.rank() == 0:
            draw(args.train, args.boxes)
        keras_dist.barrier()
        yield
        keras_dist.barrier()


def train(args):
    if args.cache_dir:
        for name in ("train", "boxes", "validation"):
            if (tree := getattr(args, name)) is not None:
                setattr(args, name, keras_dist.data.cached(tree, args.cache_dir))
    paths, classes = images_in(args.train)
    images = keras_dist.data.shard(
        paths,
        args.batch_size,
        reader=reader(classes, args.boxes, args.side, training=True),
        shuffle=False,  # the reader shuffles names
        remainder="drop",
    )
    validation = None
    if args.validation:
        validation = keras_dist.data.shard(
            images_in(args.validation)[0],
            args.batch_size,
            reader=reader(classes, args.boxes, args.side, training=False),
            shuffle=False,
        )

    steps = int(images.cardinality())
    rate = args.lr * args.batch_size * keras_dist.size() / 256
    warmup = int(args.warmup_epochs * steps)
    schedule = keras.optimizers.schedules.CosineDecay(
        0.0, args.epochs * steps - warmup, warmup_target=rate, warmup_steps=warmup
    )
    optimizer = keras_dist.optimizers.LARS(schedule, weight_decay=5e-5)
    model = resnet(len(classes), args.side)
    model.compile(
        keras_dist.DistributedOptimizer(optimizer),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )

    alone = images_per_second(images, steps * args.batch_size)
    clock = Clock(steps * args.batch_size)
    history = model.fit(
        keras_dist.data.prefetch(images),
        validation_data=validation,
        epochs=args.epochs,
        callbacks=keras_dist.callbacks(clock),
        verbose=2,
    )
    keras_dist.verify_replicas(model)
    training = of_all_ranks(clock.images_per_second)
    if keras_dist.rank() == 0:
        bound = "reading" if training > 0.8 * alone else "computing"
        print(
            f"\nTrained ResNet-50 on {len(paths)} images of {len(classes)} classes with "
            f"{keras_dist.size()} ranks, loss {history.history['loss'][-1]:.3f}: "
            f"reading alone {alone:,.0f} images/s, with training {training:,.0f} images/s: "
            f"{bound} bounds. All replicas are equal."
        )


def resnet(classes, side):
    body = keras.applications.ResNet50(
        weights=None, include_top=False, pooling="avg", input_shape=(side, side, 3)
    )
    # Softmax and loss in float32, whatever the policy.
    logits = keras.layers.Dense(classes, dtype="float32")(body.output)
    return keras.Model(body.input, logits)


class Clock(keras.callbacks.Callback):
    """How fast the last epoch was, without its validation; the first compiles."""

    def __init__(self, images):
        super().__init__()
        self.images = images
        self.images_per_second = 0.0

    def on_epoch_begin(self, epoch, logs=None):
        self.began = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        self.ended = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        self.images_per_second = self.images / (self.ended - self.began)


def images_per_second(dataset, images):
    """Returns how many images all ranks read in a second while nobody trains."""
    next(iter(dataset))  # threads start, caches fill
    keras_dist.barrier()
    began = time.perf_counter()
    for _ in dataset:
        pass
    return of_all_ranks(images / (time.perf_counter() - began))


def of_all_ranks(speed):
    return float(keras_dist.allreduce(speed, op=keras_dist.Sum))


if __name__ == "__main__":
    main()
