"""Batch normalisation with the mean and variance of the batches of all ranks.

Forward adds up, over the ranks, the number of values, their sum and the sum of their squares: one allreduce of 2 C + 1
numbers, however many ranks there are, and right also for ranks with fewer values, none, or that have joined (they add
zeros). An allgather of each rank's mean and variance would cost as many times that as there are ranks. The sums travel
as float64, which is wide enough to take the square of the mean from the mean of the squares of float32 inputs.
Backward adds up the two sums that the gradient of the input needs: one allreduce of 2 C numbers. Both wait, as the next
step needs what they compute. What each rank computes on its own is in batch_norm_kernels.py.
"""
import torch
from torch.nn.modules.batchnorm import _BatchNorm

from lightcc.core import ops
from lightcc.torch.batch_norm_kernels import channels_are_last, flat, formed, kernels_of, unflat, wide
from lightcc.torch.mpi_ops import Sum, allgather_async, allreduce_async, size, synchronize  # noqa: F401


class SyncBatchNorm(_BatchNorm):
    """torch.nn.BatchNorm1d, 2d and 3d, with statistics over the batches of all ranks in training.

    In evaluation, and with one rank, it is the local one. All ranks must call it, each as often and in the same order,
    in forward and in backward; a rank without data gives an input of no rows, and calls backward too.
    num_features: C. input: [N, C] or [N, C, ...] in any memory format, which the output has too, any floating dtype, on
    the CPU or a CUDA GPU; N may differ between ranks. float16 and bfloat16 are computed in float32. eps, momentum
    (None: the plain average of all steps), affine, track_running_stats, parameters, buffers and state_dict: those of
    torch.nn.BatchNorm. The gradients of weight and bias are this rank's, to be averaged by DistributedOptimizer.

    Errors: ValueError for an input of fewer than 2 dimensions or another C, before hvd.init(), and on all ranks if they
    have fewer than 2 values a channel together; RuntimeError from backward(create_graph=True); HorovodInternalError as
    from allreduce.
    Source: horovod.torch.sync_batch_norm; there, an input on the CPU is an error.

    >>> layer = hvd.SyncBatchNorm(3); y = layer(torch.randn(4, 3) + hvd.rank())
    >>> hvd.allreduce(y.mean(0)).abs().max().item() < 1e-5
    True
    """

    def __init__(self, num_features, eps=1e-5, momentum=0.1, affine=True, track_running_stats=True):
        super().__init__(num_features, eps, momentum, affine, track_running_stats)

    @classmethod
    def convert_sync_batchnorm(cls, module: torch.nn.Module) -> torch.nn.Module:
        """Returns the module with each torch.nn.BatchNorm in it replaced, which keeps its parameters and buffers.

        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
        >>> isinstance(hvd.SyncBatchNorm.convert_sync_batchnorm(model)[1], hvd.SyncBatchNorm)
        True
        """
        result = module
        if isinstance(module, _BatchNorm) and not isinstance(module, cls):
            result = cls(module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats)
            result.weight, result.bias, result.training = module.weight, module.bias, module.training
            for name, buffer in module.named_buffers(recurse=False):
                setattr(result, name, buffer)
        for name, child in module.named_children():
            setattr(result, name, cls.convert_sync_batchnorm(child))
        return result

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalises; waits for the other ranks in training."""
        self._check_input_dim(input)
        if not self.training or size() == 1:
            return self._local(input)
        input = input if channels_are_last(input) else input.contiguous()
        mean, variance, count = _statistics(input, self.eps)
        if self.track_running_stats and self.running_mean is not None:
            self._track(mean, variance * (count / (count - 1)))
        return _Normalise.apply(input, self.weight, self.bias, mean, variance, count, self.eps)

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"SyncBatchNorm expected an input of at least 2 dimensions, not {input.dim()}.")
        if input.shape[1] != self.num_features:
            raise ValueError(f"SyncBatchNorm expected {self.num_features} channels in dimension 1 of the input, not "
                             f"{input.shape[1]}.")

    def _local(self, input: torch.Tensor) -> torch.Tensor:
        """torch.nn.BatchNorm; flat where PyTorch could mistake the memory format (batch_norm_kernels.py)."""
        if input.is_cuda or input.dim() < 4 or 1 not in input.shape:
            return super().forward(input)
        last = channels_are_last(input)
        return unflat(super().forward(flat(input, last)), input, last)

    def _track(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        """Moves the running statistics; variance: the unbiased one."""
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
            factor = 1.0 / self.num_batches_tracked.item() if self.momentum is None else self.momentum
            for running, new in ((self.running_mean, mean), (self.running_var, variance)):
                running.copy_(torch.lerp(running.to(new.dtype), new, factor))


def _statistics(input: torch.Tensor, eps: float):
    """Mean and (biased) variance of each channel over all ranks, and the number of values that they are of."""
    input = input.detach()
    channels = input.shape[1]
    sums = torch.zeros(2 * channels + 1, dtype=torch.float64, device=input.device)
    if input.numel():
        mean, variance = kernels_of(input).statistics(flat(input, channels_are_last(input)), eps)
        count = input.numel() // channels
        sums[0] = count
        sums[1:channels + 1] = mean * count
        sums[channels + 1:] = (variance + mean * mean) * count
    ops.allreduce_(sums, name="sync_batch_norm.forward", op=Sum)
    count = int(sums[0])
    if count < 2:
        raise ValueError(f"SyncBatchNorm expected more than 1 value per channel when training, not {count} on all "
                         "ranks together.")
    mean = sums[1:channels + 1] / count
    variance = (sums[channels + 1:] / count - mean * mean).clamp_(min=0)
    return mean.to(wide(input.dtype)), variance.to(wide(input.dtype)), count


class _Normalise(torch.autograd.Function):
    """(input - mean) / sqrt(variance + eps) * weight + bias, where mean and variance are of the inputs of all ranks.
    The input is contiguous, or its channels are last."""

    @staticmethod
    def forward(ctx, input, weight, bias, mean, variance, count, eps):
        ctx.count, ctx.last = count, channels_are_last(input)
        ctx.save_for_backward(input, weight, mean, torch.rsqrt(variance + eps))
        if not input.numel():
            return torch.empty_like(input)
        weight, bias = (None if p is None else p.to(mean.dtype) for p in (weight, bias))
        y = kernels_of(input).normalise(flat(input, ctx.last), weight, bias, mean, variance, eps)
        return formed(y, input)

    @staticmethod
    def backward(ctx, grad_output):
        if torch.is_grad_enabled():  # create_graph: what follows would have no history, and no one would be told
            raise RuntimeError("SyncBatchNorm: its backward cannot be differentiated again; use create_graph=False, or "
                               "torch.nn.BatchNorm where second derivatives are needed.")
        input, weight, mean, invstd = ctx.saved_tensors
        kernels, scale = kernels_of(input), None if weight is None else weight.to(mean.dtype)
        if input.numel():
            local = flat(grad_output, ctx.last), flat(input, ctx.last), mean, invstd, scale
            total, projected = kernels.sums(*local)
        else:
            total = projected = torch.zeros_like(mean)
        grad_input = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            means = ops.allreduce(torch.cat([total, projected]).double(), name="sync_batch_norm.backward", op=Sum)
            means = (means / ctx.count).to(mean.dtype).chunk(2)
            grad_input = formed(kernels.gradient(*local, means), input) if input.numel() else torch.zeros_like(input)
        if ctx.needs_input_grad[1]:
            grad_weight = (projected * invstd).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            grad_bias = total.to(weight.dtype)
        return grad_input, grad_weight, grad_bias, None, None, None, None
