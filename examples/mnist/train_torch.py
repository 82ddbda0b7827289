"""Trains a network on MNIST with a loop written by hand in torch.

mpirun -np 2 python examples/mnist/train_torch.py

Written as for Horovod: only its import is another one. Neither Keras nor torchvision is needed.
"""

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from options import positive

import keras_dist.torch as hvd

MNIST = Path.home() / ".keras" / "datasets" / "mnist.npz"


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--batch-size", "--batch_size", type=positive, default=64, help="images per rank and step")
    add("--test-batch-size", type=positive, default=1000, help="images per rank when testing")
    add("--epochs", type=positive, default=10)
    add("--lr", type=float, help="learning rate for one rank: 0.01, or 0.2 for the few digits")
    add("--momentum", type=float, default=0.5)
    add("--warmup-epochs", "--warmup_epochs", type=int, default=3, help="the rate grows in these")
    add("--device", choices=["cpu", "gpu"], default="cpu", help="gpu: if any")
    add("--num-threads", "--num_threads", "--num_intra", type=int, default=0, help="0: its share")
    add("--num-inter", "--num_inter", type=int, default=0, help="threads between operations")
    add("--seed", type=int, default=42)
    add("--log-interval", type=positive, default=10, help="steps from line to line")
    add("--fp16-allreduce", action="store_true", help="gradients as float16 between nodes")
    add("--data", type=Path, default=MNIST, help="mnist.npz of Keras; else scikit-learn's digits")
    return parser.parse_args()


class Net(torch.nn.Module):
    """The network of the workshops, for images of any size."""

    def __init__(self, side):
        super().__init__()
        self.conv1 = torch.nn.Conv2d(1, 10, kernel_size=5, padding=2)
        self.conv2 = torch.nn.Conv2d(10, 20, kernel_size=5, padding=2)
        self.fc1 = torch.nn.Linear(20 * (side // 4) ** 2, 50)
        self.fc2 = torch.nn.Linear(50, 10)

    def forward(self, x):
        x = torch.relu(torch.max_pool2d(self.conv1(x), 2))
        x = torch.relu(torch.max_pool2d(self.conv2(x), 2))
        x = torch.relu(self.fc1(x.flatten(1)))
        x = torch.nn.functional.dropout(x, training=self.training)
        return torch.log_softmax(self.fc2(x), dim=1)


def load_digits(path):
    """Returns data sets for training and testing, and what they are."""
    if path.exists():
        arrays = np.load(path)
        parts, brightest = [(arrays[f"x_{s}"], arrays[f"y_{s}"]) for s in ("train", "test")], 255
        source = "MNIST"
    else:
        from sklearn.datasets import load_digits

        digits = load_digits()
        order = np.random.default_rng(0).permutation(len(digits.images))
        train, test = order[:-360], order[-360:]
        parts = [(digits.images[part], digits.target[part]) for part in (train, test)]
        brightest, source = 16, "scikit-learn's digits"
    datasets = [
        torch.utils.data.TensorDataset(
            torch.from_numpy((images[:, None] / brightest).astype("float32")),
            torch.from_numpy(labels.astype("int64")),
        )
        for images, labels in parts
    ]
    return *datasets, source


def tensor_average(val, name):
    tensor = torch.tensor(val)
    return hvd.allreduce(tensor, name=name).item()


def take_device(args):
    if args.num_threads:
        torch.set_num_threads(args.num_threads)
    if args.num_inter:
        torch.set_num_interop_threads(args.num_inter)
    if args.device == "gpu" and torch.cuda.is_available():
        torch.cuda.set_device(hvd.local_rank())
        return torch.device("cuda")
    if args.device == "gpu" and hvd.rank() == 0:
        print("There is no GPU that torch can use: training on the CPU.")
    return torch.device("cpu")


def load_part(dataset, batch_size, shuffle):
    """Returns a loader of this rank's part of a data set, in another order in each epoch."""
    sampler = torch.utils.data.distributed.DistributedSampler(
        dataset, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=shuffle
    )
    return torch.utils.data.DataLoader(dataset, batch_size=batch_size, sampler=sampler)


def make_optimizer(args, model, steps):
    """Returns the distributed optimizer, and the schedule by which its rate grows at first."""
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=args.momentum)
    warmup = max(1, args.warmup_epochs * steps)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / hvd.size(), total_iters=warmup)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    return optimizer, schedule


def train(epoch, args, model, loader, optimizer, schedule, device):
    model.train()
    loader.sampler.set_epoch(epoch)
    loss_total, right = 0.0, 0
    for batch, (x, y) in enumerate(loader):
        x, y = x.to(device), y.to(device)
        optimizer.zero_grad()
        output = model(x)
        loss = torch.nn.functional.nll_loss(output, y)
        loss.backward()
        optimizer.step()
        schedule.step()
        loss_total += loss.item()
        right += (output.argmax(1) == y).sum().item()
        if batch % args.log_interval == 0 and hvd.rank() == 0:
            print(f"Epoch {epoch} [{batch}/{len(loader)}] loss {loss.item():.4f}")
    loss = tensor_average(loss_total / len(loader), "loss")
    accuracy = tensor_average(right / len(loader.sampler), "accuracy")
    if hvd.rank() == 0:
        print(f"Epoch {epoch}: average loss {loss:.4f}, accuracy {accuracy:.1%}")


def test(model, loader, device):
    """Returns the accuracy on the images of all ranks."""
    model.eval()
    with torch.no_grad():
        right = sum((model(x.to(device)).argmax(1).cpu() == y).sum().item() for x, y in loader)
    return tensor_average(right / len(loader.sampler), "test accuracy")


def main():
    args = parse_arguments()
    hvd.init()
    torch.manual_seed(args.seed)
    device = take_device(args)
    train_dataset, test_dataset, source = load_digits(args.data)
    if args.lr is None:
        args.lr = 0.01 if source == "MNIST" else 0.2
    train_loader = load_part(train_dataset, args.batch_size, shuffle=True)
    test_loader = load_part(test_dataset, args.test_batch_size, shuffle=False)
    model = Net(train_dataset[0][0].shape[-1]).to(device)
    optimizer, schedule = make_optimizer(args, model, len(train_loader))
    start = time.perf_counter()
    for epoch in range(1, args.epochs + 1):
        train(epoch, args, model, train_loader, optimizer, schedule, device)
    images = args.epochs * len(train_loader.sampler) * hvd.size()
    speed = images / (time.perf_counter() - start)
    accuracy = test(model, test_loader, device)
    if hvd.rank() == 0:
        print(
            f"Trained on {source} with {hvd.size()} ranks: {speed:,.0f} images/s in total, "
            f"test accuracy {accuracy:.1%}"
        )


if __name__ == "__main__":
    main()
