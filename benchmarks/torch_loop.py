"""A training loop of plain torch, with and without DistributedDataParallel."""

import os
import tempfile

import torch
from ranks import mpi_world


class Loop:
    """A torch module with torch's own training loop.

    Args:
        module: the module; a Keras model is one with the backend torch.
        averages: whether DistributedDataParallel averages its gradients, over gloo.
        rate: learning rate. Defaults to 0.01.
        overlaps: whether DistributedDataParallel averages while others are computed. Otherwise
            its second bucket holds all gradients but the first.
        period: after so many steps PostLocalSGDOptimizer averages the weights. Defaults to 0:
            never.
    """

    def __init__(self, module, averages, rate=0.01, overlaps=True, period=0):
        self.model = self.called = module
        if averages:
            join_gloo()
            size = {} if overlaps else {"bucket_cap_mb": 2**20}
            self.called = torch.nn.parallel.DistributedDataParallel(module, **size)
        self.optimizer = torch.optim.SGD(weights_of(module), rate)
        if period:
            join_gloo()
            self.optimizer = averaging(self.optimizer, period)
        self.loss = torch.nn.CrossEntropyLoss()

    def fit(self, inputs, labels, batch_size, after_step):
        """Trains for an epoch.

        Args:
            inputs: an array, or a tuple of arrays for a Keras model of several inputs.
            labels: the classes.
            batch_size: samples a step.
            after_step: a function of the logs, called after each step.
        """
        several = isinstance(inputs, tuple)
        tensors = [torch.from_numpy(array) for array in (inputs if several else [inputs])]
        labels = torch.from_numpy(labels)
        for step in range(len(labels) // batch_size):
            rows = slice(step * batch_size, (step + 1) * batch_size)
            batch = [tensor[rows] for tensor in tensors]
            self.optimizer.zero_grad()
            loss = self.loss(self.called(batch if several else batch[0]), labels[rows])
            loss.backward()
            self.optimizer.step()
            after_step({"loss": loss.detach()})

    def bound_to(self, inputs, labels, batch_size):
        """Returns a function of a clock that trains for an epoch; its `model` is the module."""

        def fit(clock):
            clock.batches = 0
            self.fit(inputs, labels, batch_size, clock.count)

        fit.model = self.model
        return fit


def averaging(optimizer, period):
    """Returns torch's optimizer that averages weights after so many steps of another."""
    from torch.distributed.algorithms.model_averaging import averagers
    from torch.distributed.optim import PostLocalSGDOptimizer

    return PostLocalSGDOptimizer(optimizer, averagers.PeriodicModelAverager(period, 0))


def weights_of(module):
    """Returns the parameters that are trained."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def cnn():
    torch.manual_seed(0)
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
    torch.manual_seed(0)
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
