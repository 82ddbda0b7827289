"""torch: tensors as host arrays, and host arrays as tensors. Copies only what lies elsewhere."""

import numpy as np
import torch

__all__ = [
    "copy_to",
    "dtype_of",
    "rows_of",
    "sparse_of",
    "to_numpy",
    "to_torch",
    "write_into",
]


def dtype_of(tensor: torch.Tensor) -> np.dtype:
    """Returns the dtype that a tensor has as an array."""
    return to_numpy(torch.empty(0, dtype=tensor.dtype)).dtype


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """Returns a tensor as an array: a view of one on the CPU, a copy of one elsewhere."""
    host = tensor.detach() if tensor.requires_grad else tensor
    if not host.is_cpu:
        host = _to_host(host)
    if not host.is_contiguous():
        host = host.contiguous()
    if host.dtype is torch.bfloat16:
        import ml_dtypes  # numpy's own dtypes do not have it

        return host.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return host.numpy()


def to_torch(array: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    """Returns an array as a tensor of the dtype and device of `like`: a view on the CPU."""
    if like.dtype is torch.bfloat16:
        tensor = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    else:
        tensor = torch.from_numpy(array)
    return tensor if like.is_cpu else tensor.to(like.device)


def copy_to(device: torch.device, array: np.ndarray) -> torch.Tensor:
    """Returns a copy of an array as a tensor on a device."""
    if array.dtype.name == "bfloat16":
        return torch.tensor(array.view(np.int16), device=device).view(torch.bfloat16)
    return torch.tensor(array, device=device)


def write_into(tensor: torch.Tensor, array: np.ndarray) -> torch.Tensor:
    """Writes an array into a tensor, where it lies, and returns it; autograd is not told."""
    with torch.no_grad():
        return tensor.copy_(to_torch(array, tensor))


def rows_of(tensor: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Returns the values of a coalesced sparse tensor, and one number for the place of each.

    Several sparse dimensions count as one, row by row.
    """
    values, places = to_numpy(tensor.values()), to_numpy(tensor.indices())
    sparse = tensor.shape[: tensor.sparse_dim()]
    single = places[0] if len(sparse) == 1 else np.ravel_multi_index(tuple(places), sparse)
    return values, single


def sparse_of(rows: np.ndarray, places: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    """Returns the sparse tensor of what `rows_of` gives, in ascending order, as `like` is one."""
    sparse = like.shape[: like.sparse_dim()]
    whole = places[None] if len(sparse) == 1 else np.stack(np.unravel_index(places, sparse))
    return torch.sparse_coo_tensor(
        to_torch(whole, like.indices()),
        to_torch(rows, like.values()),
        like.shape,
        is_coalesced=True,
        check_invariants=False,
    )


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type != "cuda":
        return tensor.cpu()
    # The GPU writes to memory that is pinned by itself; to other memory the driver copies twice.
    staging = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return staging.copy_(tensor)
