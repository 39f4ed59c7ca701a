"""The reductions as a script calls them: on tensors and tf.IndexedSlices, compressed for the way, on a device.

Each is differentiable and works eagerly, in a tf.function and in a v1 graph. Underneath are the operations of mpi_ops.
A sparse tensor (tf.IndexedSlices) is reduced by gathering the rows of all ranks, one after the other: rows that several
ranks have stay apart until someone adds them up, as optimizers do.
"""
import tensorflow as tf

from lightcc.compress.codec import codec_of
from lightcc.compress.compressors import CoreCompressor, refuse_core
from lightcc.core.process_sets import global_process_set
from lightcc.tensorflow import compressed
from lightcc.tensorflow.compression import Compression
from lightcc.tensorflow.mpi_ops import (
    Average,
    Sum,
    _allreduce,
    _grouped_allreduce,
    _grouped_reducescatter,
    _reducescatter,
    allgather,
    handle_average_backwards_compatibility,
    size_op,
)


def allreduce(tensor, average=None, device_dense='', device_sparse='', compression=Compression.none, op=None,
              prescale_factor=1.0, postscale_factor=1.0, name=None, process_set=global_process_set,
              ignore_name_scope=False):
    """Reduces a tensor over the ranks of the set, element by element, and returns the result on all of them.

    tensor: a tf.Tensor, a variable, or what tf.convert_to_tensor takes, of the same shape and dtype on all ranks:
    integers of 8 to 64 bits, signed or not, float16, bfloat16, float32, float64 or, but for averages and factors,
    bool. Or tf.IndexedSlices, whose numbers of rows may differ; the result is IndexedSlices too. Their indices and
    values travel as "<name>.indices" and "<name>.values", uncompressed.
    op: hvd.Average (default), Sum, Adasum, Min, Max, Product; Average or Sum for IndexedSlices. Averages of integers
    truncate towards zero; those of IndexedSlices are fractions, of the dtype that tf.truediv gives (float64; float32
    of 8 and 16 bits). average is the deprecated form of op. The factors multiply before and after the reduction.
    device_dense, device_sparse: where it runs, like "/cpu:0"; '': where TensorFlow puts it.
    compression: what travels, e.g. hvd.Compression.fp16; .topk(...) and .int8() want a name, op Average or Sum, and
    keep what is left behind (docs/compression.md). name: what the ranks meet by, in a graph with the name
    scope before it, unless ignore_name_scope. Differentiable.
    Errors: ValueError for op together with average; NotImplementedError for another op with IndexedSlices; else those
    of docs/errors.md. Source: horovod.tensorflow.

    >>> hvd.allreduce(tf.ones(3)).numpy()
    array([1., 1., 1.], dtype=float32)
    """
    op = handle_average_backwards_compatibility(op, average)
    return _allreduce_in_set(0, tensor, op, device_dense, device_sparse, compression, prescale_factor, postscale_factor,
                             name, process_set, ignore_name_scope)


def _allreduce_in_set(set_, tensor, op, device_dense, device_sparse, compression, prescale_factor, postscale_factor,
                      name, process_set, ignore_name_scope):
    """allreduce as one of a set, as for mpi_ops._allreduce; what is sparse is in none."""
    if isinstance(tensor, tf.IndexedSlices):
        return _sparse_allreduce(tensor, op, device_sparse, prescale_factor, postscale_factor, name, process_set,
                                 ignore_name_scope)
    if isinstance(compression, CoreCompressor):
        return _core_allreduce(set_, [tensor], op, device_dense, compression, prescale_factor, postscale_factor, name,
                               process_set, ignore_name_scope)[0]
    with tf.device(device_dense):
        sent, ctx = compression.compress(tf.convert_to_tensor(tensor))
        reduced = _allreduce(sent, name, op, prescale_factor, postscale_factor, ignore_name_scope, process_set,
                             set_=set_)
        return compression.decompress(reduced, ctx)


def grouped_allreduce(tensors, average=None, device_dense='', device_sparse='', compression=Compression.none, op=None,
                      prescale_factor=1.0, postscale_factor=1.0, process_set=global_process_set,
                      ignore_name_scope=False, name=None):
    """Reduces a list of tensors as one unit and returns a list. Arguments and errors as for allreduce.

    dtypes may differ. tf.IndexedSlices may be among them; these are reduced one by one, beside the unit.

    >>> [x.numpy() for x in hvd.grouped_allreduce([tf.ones(1), tf.ones(2)])]
    [array([1.], dtype=float32), array([1., 1.], dtype=float32)]
    """
    op = handle_average_backwards_compatibility(op, average)
    return _grouped_allreduce_in_set(0, tensors, op, device_dense, device_sparse, compression, prescale_factor,
                                     postscale_factor, name, process_set, ignore_name_scope)


def _grouped_allreduce_in_set(set_, tensors, op, device_dense, device_sparse, compression, prescale_factor,
                              postscale_factor, name, process_set, ignore_name_scope):
    """grouped_allreduce as one of a set, as for mpi_ops._allreduce; what is sparse is in none."""
    results = list(tensors)
    dense = [i for i, tensor in enumerate(results) if not isinstance(tensor, tf.IndexedSlices)]
    for i, tensor in enumerate(results):
        if isinstance(tensor, tf.IndexedSlices):
            results[i] = _sparse_allreduce(tensor, op, device_sparse, prescale_factor, postscale_factor,
                                           name and f"{name}.{i}", process_set, ignore_name_scope)
    if dense and isinstance(compression, CoreCompressor):
        reduced = _core_allreduce(set_, [results[i] for i in dense], op, device_dense, compression, prescale_factor,
                                  postscale_factor, name, process_set, ignore_name_scope)
        for i, tensor in zip(dense, reduced):
            results[i] = tensor
    elif dense:
        with tf.device(device_dense):
            sent, contexts = _compressed([results[i] for i in dense], compression)
            reduced = _grouped_allreduce(sent, name, op, prescale_factor, postscale_factor, ignore_name_scope,
                                         process_set, set_=set_)
            for i, tensor, ctx in zip(dense, reduced, contexts):
                results[i] = compression.decompress(tensor, ctx)
    return results


def reducescatter(tensor, device_dense='', compression=Compression.none, op=Average, name=None,
                  process_set=global_process_set, ignore_name_scope=False, prescale_factor=1.0, postscale_factor=1.0):
    """Reduces, then gives rank i of the set the i-th part of dimension 0; the first `rows % size` ranks get one more.

    Arguments and errors as for allreduce; op: all but Adasum. Differentiable. NotImplementedError for tf.IndexedSlices.

    >>> hvd.reducescatter(tf.ones(hvd.size())).numpy()
    array([1.], dtype=float32)
    """
    _expect_dense([tensor])
    refuse_core(compression, "reducescatter")
    with tf.device(device_dense):
        sent, ctx = compression.compress(tf.convert_to_tensor(tensor))
        reduced = _reducescatter(sent, name, op, prescale_factor, postscale_factor, ignore_name_scope, process_set)
        return compression.decompress(reduced, ctx)


def grouped_reducescatter(tensors, device_dense='', compression=Compression.none, op=Average,
                          process_set=global_process_set, prescale_factor=1.0, postscale_factor=1.0):
    """reducescatter of a list of tensors as one unit; returns a list.

    >>> [x.numpy() for x in hvd.grouped_reducescatter([tf.ones(hvd.size())])]
    [array([1.], dtype=float32)]
    """
    tensors = list(tensors)
    _expect_dense(tensors)
    refuse_core(compression, "grouped_reducescatter")
    if not tensors:
        return tensors
    with tf.device(device_dense):
        sent, contexts = _compressed(tensors, compression)
        reduced = _grouped_reducescatter(sent, op=op, prescale_factor=prescale_factor,
                                         postscale_factor=postscale_factor, process_set=process_set)
        return [compression.decompress(tensor, ctx) for tensor, ctx in zip(reduced, contexts)]


def _core_allreduce(set_, tensors, op, device, compression, prescale, postscale, name, process_set, ignore_name_scope):
    """All-reduces dense tensors as one unit, compressed by the core if each of them would be."""
    if name is None:
        raise ValueError(f"allreduce with {compression} needs a name, by which what is left behind of the tensor is "
                         "found again.")
    if op not in (Average, Sum):
        raise ValueError(f"allreduce of {name} with {compression}: op must be Average or Sum.")
    with tf.device(device):
        tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
        why = next(filter(None, (compressed.why_dense(tensor, name, compression) for tensor in tensors)), "")
        codec_of(compression).note(str(name), why)
        if not why:
            return compressed.allreduce(tensors, name, op, prescale, postscale, process_set, codec_of(compression),
                                        compression, set_)
        if len(tensors) == 1:
            return [_allreduce(tensors[0], name, op, prescale, postscale, ignore_name_scope, process_set, set_=set_)]
        return _grouped_allreduce(tensors, name, op, prescale, postscale, ignore_name_scope, process_set, set_=set_)


def _sparse_allreduce(slices, op, device, prescale, postscale, name, process_set, ignore_name_scope):
    if op not in (Average, Sum):
        raise NotImplementedError(f"allreduce of {name or 'tf.IndexedSlices'}: op must be Average or Sum; another one "
                                  "needs the zeros too. Send tf.convert_to_tensor(slices), or pass sparse_as_dense="
                                  "True to the optimizer or tape.")
    with tf.device(device):
        slices = _scaled(slices, prescale)
        indices, values = (allgather(part, name and f"{name}.{suffix}", ignore_name_scope, process_set)
                           for part, suffix in ((slices.indices, "indices"), (slices.values, "values")))
        return _scaled(tf.IndexedSlices(values, indices, slices.dense_shape), postscale,
                       size_op(process_set.process_set_id) if op == Average else None)


def _scaled(slices, factor, divisor=None):
    """Slices times a factor, by a divisor. Integers: the quotient is that of tf.truediv, a fraction (of int32 and int64
    a float64, of 8 and 16 bits a float32), as Horovod has it; without a divisor they stay integers, and what is
    truncated is a sum, not each part of it, after a product in float64."""
    if factor == 1.0 and divisor is None:
        return slices
    indices, values = slices.indices, slices.values
    if divisor is not None:
        if slices.dtype.is_integer:
            values = tf.cast(values, tf.float64 if values.dtype.size >= 4 else tf.float32)
        values /= tf.cast(divisor, values.dtype)
        if factor != 1.0:
            values *= tf.cast(factor, values.dtype)
    elif slices.dtype.is_integer:
        indices, places = tf.unique(indices)
        values = tf.math.unsorted_segment_sum(values, places, tf.size(indices))
        values = tf.cast(tf.cast(values, tf.float64) * factor, values.dtype)
    else:
        values *= tf.cast(factor, values.dtype)
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def _compressed(tensors, compression):
    """What is sent of each tensor, and what is needed to undo it."""
    pairs = [compression.compress(tf.convert_to_tensor(tensor)) for tensor in tensors]
    return [sent for sent, _ in pairs], [ctx for _, ctx in pairs]


def _expect_dense(tensors) -> None:
    if any(isinstance(tensor, tf.IndexedSlices) for tensor in tensors):
        raise NotImplementedError("reducescatter of tf.IndexedSlices: each rank gets a run of rows, so all rows must "
                                  "be there. Send tf.convert_to_tensor(slices).")
