"""A sampler that knows which samples of an epoch are done, whatever the number of ranks."""

import random
from collections.abc import Iterable, Iterator, Sized
from typing import Any

import torch

from keras_dist import runtime

__all__ = ["ElasticSampler"]


class ElasticSampler(torch.utils.data.Sampler):
    """Shares out over the ranks what is left of an epoch.

    A job that is started anew within an epoch, with more ranks or fewer, goes on with the samples
    that nobody has processed: tell it of each batch by `record_batch`, keep `state_dict()` with
    the model, and give it to `load_state_dict`. Every rank gets as many samples; where they do not
    divide, the first ones are used twice.

    Args:
        dataset: what has a length.
        shuffle: whether samples come in another order in each epoch. Defaults to `True`.
        seed: of that order, equal on all ranks. Defaults to 0.

    Attributes:
        epoch: the number of the epoch.
        processed_indices: the samples of it that are done.

    Example:
    ```python
    import torch
    import keras_dist.torch as hvd

    dataset, epochs = torch.arange(100), 2
    sampler = hvd.ElasticSampler(dataset)
    loader = torch.utils.data.DataLoader(dataset, batch_size=32, sampler=sampler)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for number, batch in enumerate(loader):
            train_step(batch)
            sampler.record_batch(number, 32)
    ```
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0):
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_indices: set[int] = set()
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch, in which nothing is processed yet.

        Args:
            epoch: its number, which decides the order of the samples.
        """
        self.epoch = epoch
        self.processed_indices = set()
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Takes note that a batch of this rank has been processed.

        Args:
            batch_idx: the number of the batch since the iteration began.
            batch_size: samples in each batch of a rank.
        """
        self.record_indices(self.get_indices(batch_idx, batch_size))

    def record_indices(self, indices: Iterable[int]) -> None:
        """Takes note that samples have been processed.

        Args:
            indices: their places in the data set.
        """
        self.processed_indices.update(indices)

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """Returns the places, in the data set, of the samples of a batch of this rank."""
        return self.indices[batch_idx * batch_size : (batch_idx + 1) * batch_size]

    def state_dict(self) -> dict[str, Any]:
        """Returns the epoch and the samples that this rank knows to be processed."""
        return {"epoch": self.epoch, "processed_indices": set(self.processed_indices)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the epoch and what is processed, of all ranks, and shares out the rest.

        Args:
            state_dict: of `state_dict`, with the indices of all ranks put together.
        """
        self.epoch = state_dict["epoch"]
        self.processed_indices = set(state_dict["processed_indices"])
        self.reset()

    def reset(self) -> None:
        """Shares out what is not processed over the ranks that there are now."""
        self.num_replicas, self.rank = runtime.size(), runtime.rank()
        left = [place for place in range(len(self.dataset)) if place not in self.processed_indices]
        if self.shuffle:
            random.Random(f"{self.seed} {self.epoch}").shuffle(left)
        self.remaining_indices = left
        self.num_samples = -(-len(left) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas
        whole = (left * self.num_replicas)[: self.total_size] if left else []
        self.indices = whole[self.rank :: self.num_replicas]

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return self.num_samples
