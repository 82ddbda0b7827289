"""The models of the benchmark of fit in plain torch, with and without DistributedDataParallel."""

import os
import tempfile

import torch
from ranks import mpi_world


class Loop:
    """A model with torch's own training loop, behind the methods of Keras' that are used here.

    Args:
        name: which model, "cnn" or "mlp".
        averages: whether DistributedDataParallel averages its gradients, over gloo.
    """

    def __init__(self, name, averages):
        torch.manual_seed(0)
        self.model = cnn() if name == "cnn" else mlp()
        if averages:
            join_gloo()
            self.model = torch.nn.parallel.DistributedDataParallel(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01)
        self.loss = torch.nn.CrossEntropyLoss()

    def fit(self, images, labels, batch_size, epochs, verbose, callbacks):
        images, labels = torch.from_numpy(images), torch.from_numpy(labels)
        for step in range(len(images) // batch_size):
            batch = slice(step * batch_size, (step + 1) * batch_size)
            self.optimizer.zero_grad()
            loss = self.loss(self.model(images[batch]), labels[batch])
            loss.backward()
            self.optimizer.step()
            for callback in callbacks:
                callback.on_train_batch_end(step, {"loss": loss.detach()})

    def get_weights(self):
        return [parameter.detach().numpy() for parameter in self.model.parameters()]


def cnn():
    return torch.nn.Sequential(
        torch.nn.Unflatten(1, (1, 28)),
        torch.nn.Conv2d(1, 32, 3),
        torch.nn.ReLU(),
        torch.nn.Conv2d(32, 64, 3),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(64 * 12 * 12, 128),
        torch.nn.ReLU(),
        torch.nn.Linear(128, 10),
    )


def mlp():
    layers, width = [torch.nn.Flatten()], 28 * 28
    for _ in range(3):
        layers += [torch.nn.Linear(width, 2048), torch.nn.ReLU()]
        width = 2048
    return torch.nn.Sequential(*layers, torch.nn.Linear(width, 10))


def join_gloo():
    """Makes torch's process group of the ranks of the job, unless there is one."""
    if torch.distributed.is_initialized():
        return
    world = mpi_world()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    place = world.bcast(tempfile.mkdtemp() if world.rank == 0 else None)
    store = torch.distributed.FileStore(os.path.join(place, "store"), world.size)
    torch.distributed.init_process_group(
        "gloo", store=store, rank=world.rank, world_size=world.size
    )
