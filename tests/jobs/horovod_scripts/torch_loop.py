"""A Horovod training loop with torch, in the style of workshops."""

import argparse
from dataclasses import dataclass

import horovod.torch as hvd
import torch
from torch import optim

WITH_HVD = True


def tensor_average(val, name):
    tensor = torch.tensor(val)
    avg_tensor = hvd.allreduce(tensor, name=name) if WITH_HVD else tensor
    return avg_tensor.item()


@dataclass
class DataObject:
    dataset: torch.utils.data.Dataset
    sampler: torch.utils.data.Sampler
    loader: torch.utils.data.DataLoader


args = argparse.Namespace(
    lr=0.05, momentum=0.5, batch_size=16, epochs=4, cuda=torch.cuda.is_available()
)
hvd.init()
if args.cuda:
    torch.cuda.set_device(hvd.local_rank())

torch.manual_seed(hvd.rank())
samples = torch.rand(64 * hvd.size(), 6, generator=torch.Generator().manual_seed(0))
train_dataset = torch.utils.data.TensorDataset(samples, (samples.sum(1) > 3).long())
train_sampler = torch.utils.data.distributed.DistributedSampler(
    train_dataset,
    num_replicas=hvd.size(),
    rank=hvd.rank(),
)
kwargs = {"num_workers": 0, "pin_memory": args.cuda}
train_loader = torch.utils.data.DataLoader(
    train_dataset, batch_size=args.batch_size, sampler=train_sampler, **kwargs
)
data = DataObject(train_dataset, train_sampler, train_loader)

model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
if args.cuda:
    model.cuda()
compression = hvd.Compression.fp16
optimizer = optim.SGD(model.parameters(), lr=args.lr * hvd.size(), momentum=args.momentum)
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), compression=compression
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)

losses = []
for epoch in range(args.epochs):
    data.sampler.set_epoch(epoch)
    running_loss = 0.0
    for batch, target in data.loader:
        if args.cuda:
            batch, target = batch.cuda(), target.cuda()
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(batch), target)
        loss.backward()
        optimizer.step()
        running_loss += loss.item()
    losses.append(tensor_average(running_loss / len(data.loader), "loss"))

weights = torch.cat([parameter.detach().cpu().flatten() for parameter in model.parameters()])
spread = hvd.allreduce(weights, op=hvd.Max) - hvd.allreduce(weights, op=hvd.Min)
if hvd.rank() == 0:
    fell = losses[-1] < losses[0]
    print(f"ranks {hvd.size()}, loss fell: {fell}, replicas apart: {float(spread.abs().max())}")
