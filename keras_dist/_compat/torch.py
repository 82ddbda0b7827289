"""Private and undocumented names of torch."""

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, RandomSampler

from keras_dist._compat.contract import Owner, require

# The options of a loader except its data set, sampler and batches.
OPTIONS = (
    "num_workers collate_fn pin_memory timeout worker_init_fn multiprocessing_context generator "
    "prefetch_factor persistent_workers pin_memory_device in_order"
).split()

F = TypeVar("F", bound=Callable[..., Any])
COMPILER = "torch._dynamo.eval_frame"  # what `torch.compile` runs on


def version() -> str:
    """Returns the name and the version of torch."""
    return f"torch {torch.__version__}"


def writes_to(tensor: torch.Tensor) -> int:
    """Returns a number that every write to a tensor increments."""
    return tensor._version


def has_hooks(tensor: torch.Tensor) -> bool:
    """Returns whether hooks of the user read or change the gradient of a tensor."""
    return bool(tensor._backward_hooks)


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copies tensors into others of the same shapes, on a GPU by few kernels; without autograd."""
    with torch.no_grad():
        require(COPY_ALL, version)._foreach_copy_(targets, sources)


def weak_tensor_keys() -> Any:
    """Returns a dictionary whose keys are weak references to tensors, compared by identity."""
    return require(WEAK_KEYS, version).WeakTensorKeyDictionary()


def has_compiler() -> bool:
    """Returns whether the compiler of torch is imported, as by `torch.compile` and optimizers."""
    return COMPILER in sys.modules


def mark_untraced(function: F) -> F:
    """Makes `torch.compile` call a function from those that it traces; does not import it."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


def skip_frames(function: Any) -> None:
    """Makes `torch.compile` run a function that it calls; it traces what this one calls."""
    sys.modules[COMPILER].skip_code(function.__code__)  # it warns of the cache of `require`


class BatchNorm(torch.nn.BatchNorm1d):
    """torch's batch normalisation, for inputs with any number of dimensions.

    Subclasses define `_keras_dist_check(input)`, which raises if the shape is invalid.
    """

    def _check_input_dim(self, input: torch.Tensor) -> None:
        self._keras_dist_check(input)

    def _keras_dist_check(self, input: torch.Tensor) -> None:
        raise NotImplementedError


def options_of(loader: DataLoader) -> dict[str, Any]:
    """Returns the options that create a loader like this one."""
    return {name: getattr(loader, name) for name in OPTIONS}


def draws(sampler: RandomSampler) -> bool:
    """Returns whether a sampler may repeat a sample."""
    return sampler.replacement


def generators_of(loader: DataLoader) -> list[torch.Generator]:
    """Returns the generators of a loader and its samplers, without duplicates."""
    batches = loader.batch_sampler  # of any class, so it may have no attribute "sampler"
    holders = [loader, loader.sampler, batches, getattr(batches, "sampler", None)]
    found = [getattr(generator, "generator", None) for generator in holders]
    known = [generator for generator in found if isinstance(generator, torch.Generator)]
    return list({id(generator): generator for generator in known}.values())


LOADER = Owner("torch.utils.data:DataLoader")
SAMPLER = Owner("torch.utils.data:RandomSampler")

WEAK_KEYS = Owner("torch.utils.weak").name(
    "WeakTensorKeyDictionary",
    "to record which parameters have hooks",
    "gradients could not be reduced",
    on_use=True,
)

SKIP = Owner(COMPILER).name(
    "skip_code",
    "to call collectives from compiled functions",
    "torch.compile would trace them, and fail",
    on_use=True,
)

COPY_ALL = Owner("torch._C:_VariableFunctions").name(
    "_foreach_copy_",
    "to join gradients in GPU memory by few kernels",
    "gradients could not be reduced",
    on_use=True,
)

CONTRACT = (
    COPY_ALL,
    SKIP,
    WEAK_KEYS,
    Owner("torch:Tensor").name(
        "_version",
        "to detect writes to a gradient during its reduction",
        "the gradient before the write would be applied",
    ),
    Owner("torch:Tensor").name(
        "_backward_hooks",
        "to leave gradients that hooks of the user read as they are",
        "hooks would get the gradients of embeddings as sparse tensors",
    ),
    Owner("torch:Tensor").method(
        "register_post_accumulate_grad_hook(hook)",
        "to reduce gradients during backpropagation",
        "torch's DistributedOptimizer would not reduce gradients",
    ),
    Owner("torch:optim.Optimizer").method(
        "register_step_pre_hook(hook)",
        "to reduce gradients before a step",
        "each rank would train by its own gradients",
    ),
    Owner("torch:nn.BatchNorm1d").method(
        "_check_input_dim(input)",
        "to accept inputs of any number of dimensions",
        "SyncBatchNorm would refuse its inputs",
    ),
    *(
        LOADER.attribute(
            name, "to keep the options of a loader that is sharded", "the option would be lost"
        )
        for name in OPTIONS
    ),
    *(
        owner.attribute(
            name,
            "to back up the random generators of a loader",
            "a resumed fit would train in a different order",
        )
        for owner, name in (
            (LOADER, "batch_sampler"),
            (LOADER, "sampler"),
            (Owner("torch.utils.data:BatchSampler"), "sampler"),
            (SAMPLER, "generator"),
        )
    ),
    SAMPLER.attribute(
        "replacement",
        "to refuse samplers that may repeat a sample",
        "the sampler would be replaced by one without repetition",
    ),
)
