"""The gradients of the collectives: those of the mean of the ranks' losses, as in Horovod.

Each runs a collective itself, which is differentiable again.
"""
import struct

import tensorflow as tf

from lightcc.tensorflow import mpi_ops


class _Set:
    """A process set of which only the id is known."""

    def __init__(self, op):
        self.process_set_id = op.get_attr("process_set_id")


def _same(op):
    return {"ignore_name_scope": bool(op.get_attr("ignore_name_scope")), "process_set": _Set(op)}


def _factor(op, name):
    return struct.unpack("<d", struct.pack("<q", op.get_attr(name)))[0]


def _reduction(op):
    return {"op": op.get_attr("reduce_op"), "prescale_factor": _factor(op, "prescale_factor"),
            "postscale_factor": _factor(op, "postscale_factor"), **_same(op)}


@tf.RegisterGradient("HorovodAllreduce")
def _allreduce(op, grad):
    """The allreduce of the gradients, with the same operation and factors."""
    return mpi_ops._allreduce(grad, **_reduction(op)), None


@tf.RegisterGradient("HorovodGroupedAllreduce")
def _grouped_allreduce(op, *grads):
    return (*mpi_ops._grouped_allreduce(grads, **_reduction(op)), None)


@tf.RegisterGradient("HorovodAllgather")
def _allgather(op, grad):
    """This rank's rows of the averaged gradient."""
    average = mpi_ops._allreduce(grad, op=mpi_ops.Average, **_same(op))
    return _own_rows(op, [average])[0], None


@tf.RegisterGradient("HorovodGroupedAllgather")
def _grouped_allgather(op, *grads):
    averages = mpi_ops._grouped_allreduce(grads, op=mpi_ops.Average, **_same(op))
    return (*_own_rows(op, averages), None)


def _own_rows(op, gathered):
    """The rows of each gathered tensor that came from this rank."""
    rows = tf.stack([tf.shape(tensor)[0] for tensor in op.inputs[:-1]])
    of_all = mpi_ops.allgather(rows[tf.newaxis], **_same(op))
    first = tf.reduce_sum(of_all[:_rank_in(op)], 0)
    return [tensor[first[i]:first[i] + rows[i]] for i, tensor in enumerate(gathered)]


def _rank_in(op):
    """How many ranks of the process set come before this one."""
    members = mpi_ops.allgather(mpi_ops.rank_op()[tf.newaxis], **_same(op))
    return tf.reduce_sum(tf.cast(members < mpi_ops.rank_op(), tf.int32))


@tf.RegisterGradient("HorovodBroadcast")
def _broadcast(op, grad):
    """The averaged gradient on the root, and zero elsewhere."""
    average = mpi_ops._allreduce(grad, op=mpi_ops.Average, **_same(op))
    on_root = tf.equal(mpi_ops.rank_op(), op.get_attr("root_rank"))
    return tf.where(on_root, average, tf.zeros_like(average)), None


@tf.RegisterGradient("HorovodAlltoall")
def _alltoall(op, grad, _):
    """The alltoall that sends the rows back; rows that were not sent, or went to a rank that has joined, have none."""
    back, came = mpi_ops.alltoall(grad, op.outputs[1], **_same(op))

    def parts(rows):
        size, splits = _size(op), op.inputs[1]  # which are empty for equal parts
        return came, tf.concat([splits, tf.fill([size - tf.size(splits)], rows // size)], 0)
    return _in_place(back, op.inputs[0], parts), None, None


def _size(op):
    return mpi_ops.size_op(op.get_attr("process_set_id"))


def _in_place(rows, tensor, parts):
    """These rows where they belong in a gradient of the tensor; zeros where none came. parts(the tensor's rows): how
    many came of each rank, all of its rows or none, and how many it has. It is called if some did not come."""
    shape = tf.shape(tensor, tf.int64)

    def spread():
        came, of_ranks = parts(tf.shape(tensor)[0])
        return tf.scatter_nd(tf.where(tf.repeat(came > 0, of_ranks)), rows, shape)
    return tf.cond(tf.equal(tf.shape(rows, tf.int64)[0], shape[0]), lambda: rows, spread)


def _scattered(op, grad):
    """Times the number of ranks for Sum; other operations than Sum and Average have no gradient."""
    reduction = op.get_attr("reduce_op")
    if reduction not in (mpi_ops.Sum, mpi_ops.Average):
        raise LookupError("reducescatter has a gradient for Sum and Average only; give it tf.stop_gradient(tensor).")
    factor = _factor(op, "prescale_factor") * _factor(op, "postscale_factor")
    if reduction == mpi_ops.Sum:
        grad *= tf.cast(_size(op), grad.dtype)
    return grad * tf.cast(factor, grad.dtype)


@tf.RegisterGradient("HorovodReducescatter")
def _reducescatter(op, grad):
    """The allgather of the gradients; zeros for ranks that have joined."""
    return _parts_in_place(op, mpi_ops.allgather(_scattered(op, grad), **_same(op)), op.inputs[0]), None


@tf.RegisterGradient("HorovodGroupedReducescatter")
def _grouped_reducescatter(op, *grads):
    gathered = mpi_ops.grouped_allgather([_scattered(op, grad) for grad in grads], **_same(op))
    return (*(_parts_in_place(op, rows, tensor) for rows, tensor in zip(gathered, op.inputs)), None)


def _parts_in_place(op, gathered, tensor):
    def parts(rows):
        size = _size(op)
        _, there = mpi_ops.alltoall(tf.zeros([size]), tf.ones([size], tf.int32), **_same(op))  # joined ranks send none
        return there, rows // size + tf.cast(tf.range(size) < rows % size, tf.int32)
    return _in_place(gathered, tensor, parts)


for _number in ("Token", "Join", "Rank", "LocalRank", "Size", "LocalSize", "ProcessSetIncluded"):
    tf.no_gradient("Horovod" + _number)
