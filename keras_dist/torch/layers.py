"""`SyncBatchNorm`: batch normalisation over the batches of all ranks."""

from typing import Any

import torch

from keras_dist import errors, runtime
from keras_dist._compat.torch import BatchNorm
from keras_dist.ops.reduce_op import Sum
from keras_dist.torch.reduce_ops import allreduce


class SyncBatchNorm(BatchNorm):
    """Batch normalisation over the batches of all ranks, as if they were one.

    In training, mean, variance and gradients are those of all ranks' batches, whose sizes may
    differ. In evaluation, and on one rank, the layer is torch's batch normalisation.

    Collective in training: every rank, in forward and in backward passes; blocks.

    Args:
        num_features: the size of dimension 1 of the input.
        eps: added to the variance. Defaults to 1e-5.
        momentum: the weight of a batch in the running statistics; `None` for the mean over all
            batches. Defaults to 0.1.
        affine: whether to learn a scale and an offset. Defaults to `True`.
        track_running_stats: whether to keep running statistics. Defaults to `True`.
        device: the device of the parameters. Defaults to torch's default device.
        dtype: the dtype of the parameters. Defaults to torch's default dtype.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self._keras_dist_check(input)
        if not self.training or runtime.size() == 1:
            return super().forward(input)
        wide = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        dims = [dim for dim in range(input.dim()) if dim != 1]
        shape = [1, -1] + [1] * (input.dim() - 2)
        count = wide.new_tensor([wide.numel() // wide.shape[1]])
        total = allreduce(torch.cat([wide.sum(dims), count]), op=Sum, name="mean of a batch")
        global_count = total[-1].detach()
        mean = total[:-1] / global_count
        centred = wide - mean.reshape(shape)
        # A second reduction: E[x**2] - E[x]**2, in one, would lose digits by cancellation.
        squares = allreduce((centred**2).sum(dims), op=Sum, name="variance of a batch")
        variance = squares / global_count
        self._update_running_stats(mean.detach(), variance.detach(), float(global_count))
        result = centred * torch.rsqrt(variance + self.eps).reshape(shape)
        if self.affine:
            result = result * self.weight.reshape(shape) + self.bias.reshape(shape)
        return result.to(input.dtype)

    def _keras_dist_check(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise errors.ArgumentError(
                runtime.where(),
                "a batch with at least two dimensions",
                f"shape {tuple(input.shape)}",
                "Pass an input of shape (batch, features, ...).",
            )

    def _update_running_stats(self, mean: Any, variance: Any, count: float) -> None:
        """Updates the running statistics by those of a batch, with the unbiased variance."""
        if not self.track_running_stats:
            return
        self.num_batches_tracked += 1
        weight = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        with torch.no_grad():
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), weight)
            unbiased = variance * (count / max(count - 1, 1))
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), weight)
