"""What one rank computes of a batch normalisation over all ranks, by functions of PyTorch: on a GPU those that
torch.nn.SyncBatchNorm calls; on the CPU, where PyTorch has no such layer, those of torch.nn.BatchNorm.

They are given flat tensors. Of four or five dimensions PyTorch guesses from strides whether the channels are last in
memory; sizes of one have arbitrary strides, and where it takes input and gradient for different formats, its gradients
are wrong on the CPU (seen with 2.13). Of [M, C] and [N, C, L] nothing is guessed.

Passes over the input are those of torch.nn.SyncBatchNorm: two in forward and two in backward.
"""
import math
from typing import Any, Optional, Tuple, Type

import torch
from torch.nn.functional import batch_norm

_LEAST_EPS = 1e-12  # with 0 PyTorch returns 0 for 1 / 0, and the variance could not be had back from it


def wide(dtype: torch.dtype) -> torch.dtype:
    """In what is computed for an input of a dtype.

    >>> wide(torch.bfloat16)
    torch.float32
    """
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def channels_are_last(x: torch.Tensor) -> bool:
    """Whether an [N, C, ...] is [N, ..., C] in memory.

    >>> channels_are_last(torch.ones(2, 3, 4, 5).contiguous(memory_format=torch.channels_last))
    True
    """
    return not x.is_contiguous() and x.movedim(1, -1).is_contiguous()


def flat(x: torch.Tensor, channels_last: bool) -> torch.Tensor:
    """[N, C, ...] as [M, C] if its channels are to be last, else as [N, C, L]; contiguous, without a copy where x is.

    >>> flat(torch.ones(2, 3, 4, 5), channels_last=False).shape
    torch.Size([2, 3, 20])
    """
    rows, channels, each = x.shape[0], x.shape[1], math.prod(x.shape[2:])
    x = x.movedim(1, -1).reshape(rows * each, channels) if channels_last else x.reshape(rows, channels, each)
    return x.contiguous()


def unflat(y: torch.Tensor, like: torch.Tensor, channels_last: bool) -> torch.Tensor:
    """A view of what flat(like, channels_last) has become, of the shape that it had.

    >>> x = torch.ones(2, 3, 4, 5); unflat(flat(x, True), x, True).shape == x.shape
    True
    """
    shape = like.shape
    return y.view(shape[0], *shape[2:], shape[1]).movedim(-1, 1) if channels_last else y.view(shape)


def formed(y: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The memory of a flat y with the shape and strides of `like`. Not a view to autograd, which refuses changes in
    place, as of ReLU(inplace=True), of views that a Function returns.

    >>> formed(torch.ones(6), torch.ones(2, 3)).shape
    torch.Size([2, 3])
    """
    return y.new_empty(0).set_(y.untyped_storage(), y.storage_offset(), like.shape, like.stride())


class Cpu:
    """x, grad: flat, of one dtype. Statistics and parameters: [C], of dtype wide(x.dtype)."""

    @staticmethod
    def statistics(x: torch.Tensor, eps: float) -> Tuple[torch.Tensor, torch.Tensor]:
        """Mean and biased variance of each channel, as float64."""
        unused = x.new_zeros(x.shape[1], dtype=wide(x.dtype))  # running statistics: what is returned has their dtype
        mean, variance = torch.batch_norm_update_stats(x, unused, unused.clone(), 0.0)
        return mean.double(), variance.double()

    @staticmethod
    def normalise(x: torch.Tensor, weight: Optional[torch.Tensor], bias: Optional[torch.Tensor], mean: torch.Tensor,
                  variance: torch.Tensor, eps: float) -> torch.Tensor:
        """(x - mean) / sqrt(variance + eps) * weight + bias."""
        return batch_norm(x, mean, variance, weight, bias, False, 0.0, eps)

    @staticmethod
    def sums(grad: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, invstd: torch.Tensor,
             weight: Optional[torch.Tensor]) -> Tuple[torch.Tensor, torch.Tensor]:
        """For each channel: the sum of grad, and that of grad * (x - mean)."""
        ones = torch.ones_like(mean)  # as weight and variance: the gradients of weight and bias are those sums then
        _, projected, total = torch.ops.aten.native_batch_norm_backward(
            grad, x, ones, mean, ones, None, None, False, 0.0, [False, True, True])
        return total, projected

    @staticmethod
    def gradient(grad: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, invstd: torch.Tensor,
                 weight: Optional[torch.Tensor], means: Tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """(grad - means[0] - (x - mean) * invstd^2 * means[1]) * invstd * weight; means: over all ranks, what sums
        returns by the number of values."""
        of_grad = invstd if weight is None else invstd * weight
        of_x = -of_grad * invstd.square() * means[1]
        constant = -of_grad * means[0] - of_x * mean
        of_grad, of_x, constant = (factor.view(-1, *[1] * (x.dim() - 2)) for factor in (of_grad, of_x, constant))
        result = torch.addcmul(constant, x.to(mean.dtype), of_x)
        return result.addcmul_(grad.to(mean.dtype), of_grad).to(x.dtype)


class Cuda(Cpu):
    """The same on a GPU."""

    @staticmethod
    def statistics(x, eps):
        eps = max(eps, _LEAST_EPS)
        mean, invstd = torch.batch_norm_stats(x, eps)
        return mean.double(), invstd.double().pow_(-2).sub_(eps)

    @staticmethod
    def normalise(x, weight, bias, mean, variance, eps):
        return torch.batch_norm_elemt(x, weight, bias, mean, torch.rsqrt(variance + eps), eps)

    @staticmethod
    def sums(grad, x, mean, invstd, weight):
        return torch.batch_norm_backward_reduce(grad, x, mean, invstd, weight, True, False, False)[:2]

    @staticmethod
    def gradient(grad, x, mean, invstd, weight, means):
        # It divides the sums by a 32-bit count, which all ranks together may exceed; these are divided already.
        one = torch.ones(1, dtype=torch.int32, device=x.device)
        return torch.batch_norm_backward_elemt(grad, x, mean, invstd, weight, *means, one)


def kernels_of(x: torch.Tensor) -> Type[Any]:
    """Those for the device that x is on.

    >>> kernels_of(torch.ones(2, 3)) is Cpu
    True
    """
    return Cuda if x.is_cuda else Cpu
