"""Private and undocumented names of torch."""

from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from keras_dist._compat.contract import Name

__all__ = ["CONTRACT", "BatchNorm", "draws", "generators_of", "options_of", "version", "writes_to"]

# The options of a loader besides its data set, its sampler and its batches.
OPTIONS = (
    "num_workers collate_fn pin_memory timeout worker_init_fn multiprocessing_context generator "
    "prefetch_factor persistent_workers pin_memory_device"
).split()
NEWER_OPTIONS = ["in_order"]  # of torch 2.6 and later


def version() -> str:
    """Returns the name and the version of torch."""
    return f"torch {torch.__version__}"


def writes_to(tensor: torch.Tensor) -> int:
    """Returns a number that grows whenever the values of a tensor are written to."""
    return tensor._version


class BatchNorm(_BatchNorm):
    """Batch normalisation of torch, of inputs with any number of dimensions.

    Subclasses define `_keras_dist_check(input)`, which raises where the shape is wrong.
    """

    def _check_input_dim(self, input: torch.Tensor) -> None:
        self._keras_dist_check(input)

    def _keras_dist_check(self, input: torch.Tensor) -> None:
        raise NotImplementedError


def options_of(loader: DataLoader) -> dict[str, Any]:
    """Returns the options with which a loader like this one is made."""
    newer = {name: vars(loader)[name] for name in NEWER_OPTIONS if name in vars(loader)}
    return {name: getattr(loader, name) for name in OPTIONS} | newer


def draws(sampler: RandomSampler) -> bool:
    """Tells whether a sampler may give a sample more than once."""
    return sampler.replacement


def generators_of(loader: DataLoader) -> list[torch.Generator]:
    """Returns the generators that a loader and its samplers were given, each once."""
    batches = loader.batch_sampler  # of any class, so its own sampler may have another name
    holders = [loader, loader.sampler, batches, getattr(batches, "sampler", None)]
    found = [getattr(one, "generator", None) for one in holders]
    known = [one for one in found if isinstance(one, torch.Generator)]
    return list({id(one): one for one in known}.values())


def _loader() -> Any:
    return DataLoader


CONTRACT = (
    Name(
        lambda: torch.Tensor,
        "_version",
        "to notice that a gradient was changed while it was being reduced",
        "the gradient before the change would be applied",
    ),
    Name(
        lambda: torch.Tensor,
        "register_post_accumulate_grad_hook",
        "to reduce gradients during backpropagation",
        "gradients would not be reduced by DistributedOptimizer of torch",
        ("hook",),
    ),
    Name(
        lambda: torch.optim.Optimizer,
        "register_step_pre_hook",
        "to reduce gradients before a step",
        "each rank would train by its own gradients",
        ("hook",),
    ),
    Name(
        lambda: _BatchNorm,
        "_check_input_dim",
        "to accept inputs of any number of dimensions",
        "SyncBatchNorm would refuse its inputs",
        ("input",),
    ),
    *(
        Name(
            _loader,
            name,
            "to keep the options of a loader that is sharded",
            "the option would be lost",
            instance=True,
        )
        for name in OPTIONS
    ),
    *(
        Name(
            owner,
            name,
            "to back up the generators of random numbers of a loader",
            "a resumed fit would train in another order",
            instance=True,
        )
        for owner, name in (
            (_loader, "batch_sampler"),
            (_loader, "sampler"),
            (lambda: BatchSampler, "sampler"),
            (lambda: RandomSampler, "generator"),
        )
    ),
    Name(
        lambda: RandomSampler,
        "replacement",
        "to refuse samplers that draw a sample more than once",
        "such a sampler would be replaced by one that does not",
        instance=True,
    ),
)
