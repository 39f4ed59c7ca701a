"""hvd.allreduce and hvd.grouped_allreduce of tf.IndexedSlices. In eager mode, in a tf.function and in a v1 session."""
import numpy as np
import pytest
import tensorflow as tf
from modes import MODES, eager, session

import lightcc.tensorflow as hvd
import ranks

pytestmark = pytest.mark.usefixtures("job")
SHAPE = (6, 2)


@pytest.mark.parametrize("np", (1, 3))
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


@pytest.fixture(params=MODES.values(), ids=MODES)
def run(request):
    return request.param


def rows_of(rank, dtype=np.float32):
    """The values and indices of a rank: another number of rows on each, some of them twice, none on rank 1."""
    count = 0 if rank == 1 else 3 + rank
    values = np.arange(count * SHAPE[1]).reshape(count, SHAPE[1]) + 7 * rank
    return values.astype(dtype), np.array([(2 * i + rank) % 4 for i in range(count)], np.int64)


def dense(values, indices, like=np.float64):
    total = np.zeros(SHAPE, like)
    np.add.at(total, indices, values)
    return total


def dense_sum(dtype=np.float64):
    """Of all ranks."""
    return sum(dense(*rows_of(rank)) for rank in range(hvd.size())).astype(dtype)


def reduced(call, run, dtype=np.float32):
    """What call(slices) makes of this rank's slices: IndexedSlicesValue."""
    return run(lambda values, indices: call(tf.IndexedSlices(values, indices, tf.constant(SHAPE))),
               *rows_of(hvd.rank(), dtype))


def expect(got, expected, rtol=1e-6):
    assert got.values.dtype == expected.dtype and got.indices.dtype == np.int64 and tuple(got.dense_shape) == SHAPE
    assert dense(got.values, got.indices) == pytest.approx(expected, rel=rtol)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def check_sum_and_average(run, dtype):
    expect(reduced(lambda x: hvd.allreduce(x, op=hvd.Sum), run, dtype), dense_sum(dtype))
    got = reduced(hvd.allreduce, run, dtype)
    expect(got, (dense_sum() / hvd.size()).astype(dtype), 1e-2 if dtype == np.float16 else 1e-6)
    with pytest.warns(DeprecationWarning):
        expect(reduced(lambda x: hvd.allreduce(x, average=False), run, dtype), dense_sum(dtype))


def check_rows_stay_apart_in_rank_order(run):
    got = reduced(lambda x: hvd.allreduce(x, op=hvd.Sum), run)
    for part, mine in ((got.values, 0), (got.indices, 1)):
        assert (part == np.concatenate([rows_of(rank)[mine] for rank in range(hvd.size())])).all()


def check_nobody_has_rows(run):
    got = run(lambda x, i: hvd.allreduce(tf.IndexedSlices(x, i, tf.constant(SHAPE))), np.zeros((0, 2), np.float32),
              np.zeros(0, np.int64))
    assert got.values.shape == (0, 2) and got.indices.shape == (0,)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def check_integers_truncate_sums_not_rows(run, dtype):
    """As for dense tensors."""
    for how in ({}, {"prescale_factor": 0.3}, {"postscale_factor": -0.7}):
        sparse = reduced(lambda x, how=how: hvd.allreduce(x, op=hvd.Sum, **how), run, dtype)
        whole = hvd.allreduce(tf.constant(dense(*rows_of(hvd.rank()), dtype)), op=hvd.Sum, **how).numpy()
        assert sparse.values.dtype == dtype
        assert (dense(sparse.values, sparse.indices, dtype) == whole).all(), how


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.int8, np.uint8, np.int16, np.uint16])
def check_averages_of_integers_are_fractions(run, dtype):
    """Unlike those of dense tensors: the rows are divided as tf.truediv does it, each for itself."""
    fraction = np.float64 if np.dtype(dtype).itemsize >= 4 else np.float32
    rows = np.concatenate([rows_of(rank, dtype)[0] for rank in range(hvd.size())])

    def call(x):
        return [hvd.allreduce(x), *hvd.grouped_allreduce([x, tf.constant([1], x.dtype)]),
                hvd.allreduce(x, postscale_factor=3.0)]

    single, grouped, whole, scaled = reduced(call, run, dtype)
    for got, factor in ((single, 1), (grouped, 1), (scaled, 3)):
        assert got.values.dtype == fraction
        assert got.values == pytest.approx(rows / fraction(hvd.size()) * factor, rel=1e-6)
    assert single.values.tolist() == (rows / fraction(hvd.size())).tolist() and whole.dtype == dtype


def check_factors(run):
    """Horovod leaves them out."""
    for op, divisor in ((hvd.Sum, 1), (hvd.Average, hvd.size())):
        got = reduced(lambda x, op=op: hvd.allreduce(x, op=op, prescale_factor=0.5, postscale_factor=6.0), run)
        expect(got, (3 * dense_sum() / divisor).astype(np.float32))


@pytest.mark.parametrize("op", [hvd.Adasum, hvd.Min, hvd.Max, hvd.Product])
def check_reductions_that_need_the_zeros(op):
    slices = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0]), tf.constant(SHAPE))
    for call in (hvd.allreduce, lambda x, **how: hvd.grouped_allreduce([tf.ones(1), x], **how)):
        with pytest.raises(NotImplementedError, match="must be Average or Sum.*tf.convert_to_tensor.*sparse_as_dense"):
            call(slices, op=op)
    with pytest.raises(ValueError, match="supersedes"):
        hvd.allreduce(slices, average=True, op=op)


@pytest.mark.parametrize("call", [hvd.reducescatter, lambda x: hvd.grouped_reducescatter([tf.ones(4), x])])
def check_reducescatter_has_none(call):
    with pytest.raises(NotImplementedError, match="reducescatter of tf.IndexedSlices"):
        call(tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0]), tf.constant(SHAPE)))


def check_mixed_lists(run):
    """Each result is where its tensor was."""
    def call(x):
        results = hvd.grouped_allreduce([tf.ones(1), x, 2 * tf.ones(2), x], op=hvd.Sum,
                                        compression=hvd.Compression.fp16)
        assert [isinstance(result, tf.IndexedSlices) for result in results] == [False, True, False, True]
        return results
    first, second, third, fourth = reduced(call, run)
    assert first == pytest.approx([hvd.size()]) and third == pytest.approx([2 * hvd.size()] * 2)
    expect(second, dense_sum(np.float32))
    expect(fourth, dense_sum(np.float32))
    only = reduced(lambda x: hvd.grouped_allreduce([x]), run)
    expect(only[0], (dense_sum() / hvd.size()).astype(np.float32))


def check_names_and_devices():
    """Two all-gathers, named after the reduction, where device_sparse says."""
    with tf.Graph().as_default() as graph:
        slices = tf.IndexedSlices(tf.compat.v1.placeholder(tf.float32, [None, 2]),
                                  tf.compat.v1.placeholder(tf.int64, [None]), tf.constant(SHAPE))
        with tf.name_scope("scope"):
            hvd.allreduce(slices, name="x", device_sparse="/cpu:0", device_dense="/cpu:1")
            hvd.allreduce(slices, name="y", device_sparse="/cpu:0", ignore_name_scope=True)
            hvd.grouped_allreduce([slices, slices], name="z", device_sparse="/cpu:0")
        gathers = {op.name: op for op in graph.get_operations() if "Allgather" in op.type}
    assert set(gathers) == {f"scope/{name}.{part}" for name in ("x", "y", "z.0", "z.1")
                            for part in ("indices", "values")}
    assert {op.device for op in gathers.values()} == {"/device:CPU:0"}
    assert all(op.get_attr("ignore_name_scope") == ("y." in name) for name, op in gathers.items())


def check_gradient_of_an_embedding(run):
    """As it is in training: slices from tf.gather, whose derivative they are."""
    def gradient(table, indices):
        if run is eager:
            with tf.GradientTape() as tape:
                tape.watch(table)
                loss = tf.reduce_sum(tf.gather(table, indices) * (hvd.rank() + 1.0))
            slices = tape.gradient(loss, table)
        else:
            slices = tf.gradients(tf.reduce_sum(tf.gather(table, indices) * (hvd.rank() + 1.0)), table)[0]
        assert isinstance(slices, tf.IndexedSlices)
        return hvd.allreduce(slices, op=hvd.Sum)
    got = run(gradient, np.ones(SHAPE, np.float32), rows_of(hvd.rank())[1])
    expected = sum(dense(np.ones((len(indices), 2)) * (rank + 1), indices)
                   for rank, indices in enumerate(rows_of(rank)[1] for rank in range(hvd.size())))
    assert dense(got.values, got.indices) == pytest.approx(expected)


def check_process_sets(run):
    if hvd.size() == 1:
        return
    last = hvd.add_process_set([hvd.size() - 1])
    if last.included():
        got = reduced(lambda x: hvd.allreduce(x, process_set=last), run)
        expect(got, dense(*rows_of(hvd.rank())).astype(np.float32))
    hvd.remove_process_set(last)


def check_disagreement():
    """Of the width of the rows; every rank is told, and the next operation works."""
    if hvd.size() == 1:
        return
    width = 3 if hvd.rank() == 0 else 2
    slices = tf.IndexedSlices(tf.ones([1, width]), tf.constant([0]), tf.constant([4, width]))
    with pytest.raises(tf.errors.FailedPreconditionError, match="ranks disagree on shape"):
        hvd.allreduce(slices, name="x")
    expect(reduced(lambda x: hvd.allreduce(x, op=hvd.Sum), session), dense_sum(np.float32))


def check_join():
    """A rank that has joined adds no rows."""
    if hvd.rank() < hvd.size() - 1:
        got = reduced(lambda x: hvd.allreduce(x, op=hvd.Sum, name="x"), eager)
        expect(got, sum(dense(*rows_of(rank)) for rank in range(hvd.size() - 1)).astype(np.float32))
    hvd.join()
