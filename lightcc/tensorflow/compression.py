"""What a tensor becomes on the wire: hvd.Compression.none, .fp16, .bf16, .topk(...), .int8() or .int4(). Names as in
horovod.tensorflow.compression.
"""
import tensorflow as tf

from lightcc.compress.compressors import Compressor, NoneCompressor, int4, int8, topk


class CastCompressor(Compressor):
    """Sends floating-point tensors as `wire`; subclasses set it. Other tensors travel as they are."""

    wire: tf.DType

    @classmethod
    def compress(cls, tensor):
        dtype = tensor.dtype.base_dtype  # a v1 variable's own dtype is a reference to it
        return tf.cast(tensor, cls.wire) if dtype.is_floating else tensor, dtype

    @staticmethod
    def decompress(tensor, ctx: tf.DType):
        return tf.cast(tensor, ctx) if ctx.is_floating else tensor


class FP16Compressor(CastCompressor):
    """Sends floating-point tensors as float16.

    >>> sent, ctx = hvd.Compression.fp16.compress(tf.ones(2)); sent.dtype, ctx
    (tf.float16, tf.float32)
    >>> hvd.Compression.fp16.decompress(sent, ctx).numpy()
    array([1., 1.], dtype=float32)
    """

    wire = tf.float16


class BF16Compressor(CastCompressor):
    """Sends floating-point tensors as bfloat16: 8 bits of precision, but the range of float32. Horovod has none.

    >>> hvd.allreduce(tf.ones(2), compression=hvd.Compression.bf16).numpy()
    array([1., 1.], dtype=float32)
    """

    wire = tf.bfloat16


class Compression:
    """The compressors there are.

    >>> hvd.allreduce(tf.ones(2), compression=hvd.Compression.fp16).numpy()
    array([1., 1.], dtype=float32)
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
    topk = staticmethod(topk)
    int8 = staticmethod(int8)
    int4 = staticmethod(int4)
