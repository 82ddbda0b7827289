"""Trains a network of torch on random images and says how many a second: on each rank, and on all.

mpirun -np 2 python examples/synthetic/torch_benchmark.py --model CNN --batch-size 32
"""

import argparse
import time

import numpy as np
import torch

import keras_dist.torch as hvd


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="CNN", help="CNN, MLP, or one of torchvision.models")
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step")
    parser.add_argument("--image-size", type=int, default=32, help="their height and width")
    parser.add_argument("--num-warmup-batches", type=int, default=10)
    parser.add_argument("--num-batches-per-iter", type=int, default=10)
    parser.add_argument("--num-iters", type=int, default=10)
    parser.add_argument("--fp16-allreduce", action="store_true", help="float16 between nodes")
    parser.add_argument("--device", choices=["cpu", "gpu"], default="cpu")
    return parser.parse_args()


def make_model(name, side):
    """Returns a network for images of CIFAR-10's shape, or of another side."""
    nn = torch.nn
    if name == "MLP":
        hidden = [nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU()]
        first = [nn.Flatten(), nn.Linear(3 * side * side, 2048), nn.ReLU()]
        return nn.Sequential(*first, *hidden, nn.Linear(2048, 1000))
    if name == "CNN":
        layers, channels = [], 3
        for width in (32, 64, 128):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
            layers += [nn.MaxPool2d(2)]
            channels = width
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 1000))
    import torchvision

    return getattr(torchvision.models, name)()


def main():
    args = parse_arguments()
    hvd.init()
    device = torch.device("cpu")
    if args.device == "gpu":
        torch.cuda.set_device(hvd.local_rank())
        device = torch.device("cuda")
    model = make_model(args.model, args.image_size).to(device)
    compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01),
        named_parameters=model.named_parameters(),
        compression=compression,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    images = torch.randn(args.batch_size, 3, args.image_size, args.image_size, device=device)
    labels = torch.randint(0, 999, (args.batch_size,), device=device)

    def seconds(batches):
        start = time.perf_counter()
        for _ in range(batches):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
        loss.item()
        return time.perf_counter() - start

    def say(text):
        if hvd.rank() == 0:
            print(text, flush=True)

    count = sum(parameter.numel() for parameter in model.parameters())
    say(f"Model: {args.model}, {count:,} parameters, on {hvd.size()} ranks")
    seconds(args.num_warmup_batches)
    speeds = []
    for number in range(args.num_iters):
        images_each = args.batch_size * args.num_batches_per_iter
        speeds.append(images_each / seconds(args.num_batches_per_iter))
        say(f"Iter #{number}: {speeds[-1]:.1f} img/sec per rank")
    mean, deviation = np.mean(speeds), 1.96 * np.std(speeds)
    total = hvd.allreduce(torch.tensor([mean, deviation]), op=hvd.Sum)
    say(f"Img/sec per rank: {mean:.1f} +-{deviation:.1f}")
    say(f"Total img/sec on {hvd.size()} ranks: {total[0]:.1f} +-{total[1]:.1f}")


if __name__ == "__main__":
    main()
