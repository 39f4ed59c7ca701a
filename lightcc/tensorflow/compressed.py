"""Allreduces of dense tensors that the core compresses: what is left behind is found by the request's name, which is
the same at once and in every graph, wherever its nodes end up."""
import numpy as np
import tensorflow as tf

from lightcc.compress.codec import Codec
from lightcc.compress.compressors import CoreCompressor
from lightcc.core import lib
from lightcc.tensorflow import mpi_ops


def allreduce(tensors, name, op, prescale, postscale, process_set, codec: Codec, compression: CoreCompressor, set_=0):
    """Reduces tensors as one unit in units without the loss scale; returns a list. set_: as for mpi_ops._allreduce."""
    scale = loss_scale(compression)
    if isinstance(scale, tf.Tensor):
        tensors = [tensor / tf.cast(scale, tensor.dtype) for tensor in tensors]
    else:
        prescale, postscale = prescale / scale, postscale * scale
    options = {"prescale_factor": prescale, "postscale_factor": postscale, "ignore_name_scope": True,
               "process_set": process_set, "codec": text_of(codec, compression), "set_": set_}
    if len(tensors) == 1:
        results = [mpi_ops._allreduce(tensors[0], name, op, **options)]
    else:
        results = mpi_ops._grouped_allreduce(tensors, name, op, **options)
    if isinstance(scale, tf.Tensor):
        results = [result * tf.cast(scale, result.dtype) for result in results]
    return results


def why_dense(tensor, name: str, compression: CoreCompressor) -> str:
    """Why a named allreduce does not compress this tensor; "": it does."""
    if not tensor.shape.is_fully_defined():
        return f"the shape of {name} is not known when its graph is built"
    return compression.why_dense(name, tensor.shape.as_list(), tensor.dtype.base_dtype.name, tensor)


def loss_scale(compression: CoreCompressor):
    """A float, or a tensor that is it when the graph runs."""
    given = compression.loss_scale
    if not callable(given):
        return compression.scale()
    scale = given()
    if tf.executing_eagerly():
        return compression.scale()
    if isinstance(scale, (int, float, np.generic)):
        return tf.ensure_shape(tf.numpy_function(lambda: np.float32(compression.scale()), [], tf.float32), [])
    return tf.convert_to_tensor(scale)


def text_of(codec: Codec, compression: CoreCompressor) -> str:
    """The attribute `codec`: csrc/api/tensorflow/codec.h."""
    if compression.kind != lib.CODEC_TOPK:
        return f"{'int8' if compression.kind == lib.CODEC_INT8 else 'int4'} name={codec.name}"
    return (f"topk ratio={compression.ratio!r} width={lib.DTYPES[compression.width]} "
            f"warmup={compression.warmup_steps} momentum={compression.momentum!r} name={codec.name}")
