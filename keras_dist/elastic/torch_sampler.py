"""A sampler that records the processed samples of an epoch, for any number of ranks."""

import itertools
import random
from collections.abc import Iterable, Iterator, Sized
from typing import Any

import torch

from keras_dist import runtime


class ElasticSampler(torch.utils.data.Sampler):
    """Distributes the remaining samples of an epoch over the ranks.

    A job that is restarted within an epoch, with any number of ranks, continues with the samples
    that have not been processed: call `record_batch` after each batch, save `state_dict()` with
    the model, and pass it to `load_state_dict`. Every rank gets the same number of samples; if
    they do not divide evenly, the first ones are used twice.

    Args:
        dataset: a data set with a length.
        shuffle: whether to shuffle in each epoch. Defaults to `True`.
        seed: seed of the order, equal on all ranks. Defaults to 0.

    Attributes:
        epoch: number of the epoch.
        processed_indices: indices of its processed samples.

    Example:
    ```python
    import torch
    import keras_dist.torch as hvd

    dataset, epochs = torch.arange(100), 2
    sampler = hvd.ElasticSampler(dataset)
    loader = torch.utils.data.DataLoader(dataset, batch_size=32, sampler=sampler)
    for epoch in range(sampler.epoch, epochs):
        for number, batch in enumerate(loader):
            train_step(batch)
            sampler.record_batch(number, 32)
        sampler.set_epoch(epoch + 1)
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
        """Starts an epoch, without processed samples.

        Call it at the end of the epoch before: at the start of an epoch it would drop the processed
        samples that `load_state_dict` has restored.

        Args:
            epoch: number of the epoch, which determines the order of the samples.
        """
        self.epoch = epoch
        self.processed_indices = set()
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Records a batch of this rank as processed.

        Args:
            batch_idx: index of the batch in the iteration.
            batch_size: number of samples of a batch of a rank.
        """
        self.record_indices(self.get_indices(batch_idx, batch_size))

    def record_indices(self, indices: Iterable[int]) -> None:
        """Records samples as processed.

        Args:
            indices: their indices in the data set.
        """
        self.processed_indices.update(indices)

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """Returns the indices of the samples of a batch of this rank."""
        return self.indices[batch_idx * batch_size : (batch_idx + 1) * batch_size]

    def state_dict(self) -> dict[str, Any]:
        """Returns the epoch and the processed indices that this rank has recorded."""
        return {"epoch": self.epoch, "processed_indices": set(self.processed_indices)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the epoch and the processed indices, and distributes the other samples.

        Args:
            state_dict: a result of `state_dict`, with the merged indices of all ranks.
        """
        self.epoch = state_dict["epoch"]
        self.processed_indices = set(state_dict["processed_indices"])
        self.reset()

    def reset(self) -> None:
        """Distributes the samples that have not been processed over the current ranks."""
        self.num_replicas, self.rank = runtime.size(), runtime.rank()
        count = len(self.dataset)
        left = [index for index in range(count) if index not in self.processed_indices]
        if self.shuffle:
            random.Random(f"{self.seed} {self.epoch}").shuffle(left)
        self.remaining_indices = left
        self.num_samples = -(-len(left) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas
        # The first ones again fill up the last round.
        whole = itertools.islice(itertools.cycle(left), self.total_size)
        self.indices = list(itertools.islice(whole, self.rank, None, self.num_replicas))

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return self.num_samples
