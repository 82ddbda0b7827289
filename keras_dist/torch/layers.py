"""Layers that look at the data of all ranks."""

from typing import Any

import torch

from keras_dist import errors, runtime
from keras_dist._compat.torch import BatchNorm
from keras_dist.ops.reduce_op import Sum
from keras_dist.torch.reduce_ops import allreduce

__all__ = ["SyncBatchNorm"]


class SyncBatchNorm(BatchNorm):
    """Batch normalisation over the batches of all ranks, as if they were one.

    In training, mean and variance are those of all ranks' batches, which may be of different
    sizes; so are the gradients. In evaluation, and on one rank, it is torch's own.

    Collective in training: every rank, in forward and in backward passes; blocks.

    Args:
        num_features: the size of dimension 1 of what comes in.
        eps: added to the variance. Defaults to 1e-5.
        momentum: the share of a batch in the running statistics, `None` for a plain mean over
            all batches. Defaults to 0.1.
        affine: whether to learn a scale and an offset. Defaults to `True`.
        track_running_stats: whether to keep running statistics. Defaults to `True`.
        device: where its parameters are.
        dtype: what they are.
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
        everyone = total[-1].detach()
        mean = total[:-1] / everyone
        centred = wide - mean.reshape(shape)
        # After the mean, and not with it: the difference of two large sums has few digits.
        squares = allreduce((centred**2).sum(dims), op=Sum, name="variance of a batch")
        variance = squares / everyone
        self._keep(mean.detach(), variance.detach(), float(everyone))
        result = centred * torch.rsqrt(variance + self.eps).reshape(shape)
        if self.affine:
            result = result * self.weight.reshape(shape) + self.bias.reshape(shape)
        return result.to(input.dtype)

    def _keras_dist_check(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise errors.ArgumentError(
                errors.explain(
                    runtime.where(),
                    "a batch with at least two dimensions",
                    f"shape {tuple(input.shape)}",
                    "Dimension 1 is that of the features.",
                )
            )

    def _keep(self, mean: Any, variance: Any, count: float) -> None:
        """Takes the statistics of a batch into the running ones, the variance unbiased."""
        if not self.track_running_stats:
            return
        self.num_batches_tracked += 1
        share = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        with torch.no_grad():
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
            unbiased = variance * (count / max(count - 1, 1))
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), share)
