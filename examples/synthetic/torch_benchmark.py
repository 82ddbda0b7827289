"""Trains a network of torch on random images and says how many a second: on each rank, and on all.

mpirun -np 2 python examples/synthetic/torch_benchmark.py --model CNN --batch-size 32
"""

import importlib.util

import torch
from measured import measure, parser

import keras_dist.torch as hvd


def parse_arguments():
    options = parser(__doc__, "CNN", "CNN, MLP, or one of torchvision.models", 32)
    options.add_argument("--device", choices=["cpu", "gpu"], default="cpu", help="gpu: if any")
    args = options.parse_args()
    if args.model in ("CNN", "MLP"):
        return args
    if importlib.util.find_spec("torchvision") is None:
        options.error(f"--model {args.model} needs torchvision, which is not installed")
    import torchvision

    if args.model not in torchvision.models.list_models(module=torchvision.models):
        options.error(f"--model {args.model}: torchvision.models has no such network")
    return args


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


def take_device(name):
    if name == "gpu" and torch.cuda.is_available():
        torch.cuda.set_device(hvd.local_rank())
        return torch.device("cuda")
    if name == "gpu" and hvd.rank() == 0:
        print("There is no GPU that torch can use: training on the CPU.")
    return torch.device("cpu")


def main():
    args = parse_arguments()
    hvd.init()
    device = take_device(args.device)
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

    def train(batches):
        loss = torch.zeros(())  # where there are none
        for _ in range(batches):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
        loss.item()

    measure(hvd, args, sum(parameter.numel() for parameter in model.parameters()), train)


if __name__ == "__main__":
    main()
