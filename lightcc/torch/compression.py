"""What a gradient or tensor becomes on the wire: hvd.Compression.none, .fp16 or .bf16."""
from typing import Any, Tuple

import torch


class Compressor:
    """The interface of a compressor: two static methods. The ranks must make tensors of equal shape and dtype."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> Tuple[torch.Tensor, Any]:
        """Returns the tensor to send, and what decompress needs to undo it.

        >>> hvd.Compression.fp16.compress(torch.ones(2))
        (tensor([1., 1.], dtype=torch.float16), torch.float32)
        """
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Undoes compress.

        >>> hvd.Compression.fp16.decompress(*hvd.Compression.fp16.compress(torch.ones(2)))
        tensor([1., 1.])
        """
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends tensors as they are.

    >>> hvd.Compression.none.compress(torch.ones(1))
    (tensor([1.]), None)
    """

    @staticmethod
    def compress(tensor):
        return tensor, None

    @staticmethod
    def decompress(tensor, ctx):
        return tensor


class CastCompressor(Compressor):
    """Sends floating-point tensors as `wire`; subclasses set it. Other tensors travel as they are."""

    wire: torch.dtype

    @classmethod
    def compress(cls, tensor):
        return tensor.to(cls.wire) if tensor.is_floating_point() else tensor, tensor.dtype

    @staticmethod
    def decompress(tensor, ctx: torch.dtype):
        return tensor.to(ctx) if ctx.is_floating_point else tensor


class FP16Compressor(CastCompressor):
    """Sends floating-point tensors as float16.

    >>> hvd.allreduce(torch.ones(2), compression=hvd.Compression.fp16)
    tensor([1., 1.])
    """

    wire = torch.float16


class BF16Compressor(CastCompressor):
    """Sends floating-point tensors as bfloat16: 8 bits of precision, but the range of float32. Horovod has none.

    >>> hvd.allreduce(torch.ones(2), compression=hvd.Compression.bf16)
    tensor([1., 1.])
    """

    wire = torch.bfloat16


class Compression:
    """The compressors there are.

    >>> hvd.allreduce(torch.ones(2), compression=hvd.Compression.fp16)
    tensor([1., 1.])
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
