"""What a gradient or tensor becomes on the wire: hvd.Compression.none, .fp16, .bf16, .topk(...), .int8()
or .int4()."""
import torch

from lightcc.compress.compressors import Compressor, NoneCompressor, int4, int8, topk


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

    >>> sent = hvd.Compression.fp16.compress(torch.ones(2)); sent
    (tensor([1., 1.], dtype=torch.float16), torch.float32)
    >>> hvd.Compression.fp16.decompress(*sent)
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
    topk = staticmethod(topk)
    int8 = staticmethod(int8)
    int4 = staticmethod(int4)
