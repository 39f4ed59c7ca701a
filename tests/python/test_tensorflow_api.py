"""What lightcc.tensorflow adds to its operations: compression, devices, names, whatever can be sent. In eager mode, in
a tf.function and in a v1 session (modes.py)."""
import numpy as np
import pytest
import tensorflow as tf
from modes import MODES, session

import lightcc.tensorflow as hvd
import ranks
from lightcc.tensorflow.compression import Compressor, FP16Compressor, NoneCompressor
from lightcc.tensorflow.util import _executing_eagerly, tf_variable

pytestmark = pytest.mark.usefixtures("job")
v1 = tf.compat.v1
FINE = 1 + 2 ** -9  # bfloat16 rounds it to 1
FINER = 1 + 2 ** -12  # and float16 rounds this to 1


@pytest.mark.parametrize("np", (1, 3))
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


@pytest.fixture(params=MODES.values(), ids=MODES)
def run(request):
    return request.param


def total():
    """1 + 2 + ... of all ranks."""
    return hvd.size() * (hvd.size() + 1) / 2


def mine(*shape, dtype=np.float32):
    return np.full(shape, hvd.rank() + 1, dtype)


def is_ours(op):
    return op.type.startswith("Horovod") and op.type != "HorovodToken"


# Arguments

def check_average_is_the_default(run):
    mean = total() / hvd.size()
    for call in (hvd.allreduce, lambda x: hvd.grouped_allreduce([x])[0]):
        assert run(call, mine(3)) == pytest.approx(mean)
        assert run(lambda x, call=call: call(x), mine(2, 2)).dtype == np.float32
    for call in (hvd.reducescatter, lambda x: hvd.grouped_reducescatter([x])[0]):
        got = run(call, mine(2 * hvd.size(), 3))
        assert got.shape == (2, 3) and got == pytest.approx(mean)


def check_op_and_average(run):
    assert run(lambda x: hvd.allreduce(x, op=hvd.Sum), mine(3)) == pytest.approx(total())
    assert run(lambda x: hvd.grouped_allreduce([x], op=hvd.Max)[0], mine(3)) == pytest.approx(hvd.size())
    assert run(lambda x: hvd.reducescatter(x, op=hvd.Sum), mine(hvd.size())) == pytest.approx(total())
    with pytest.warns(DeprecationWarning):
        assert run(lambda x: hvd.allreduce(x, False), mine(3)) == pytest.approx(total())
    with pytest.warns(DeprecationWarning):
        assert run(lambda x: hvd.grouped_allreduce([x], True)[0], mine(3)) == pytest.approx(total() / hvd.size())
    for call in (hvd.allreduce, lambda x, **how: hvd.grouped_allreduce([x], **how)):
        with pytest.raises(ValueError, match="supersedes average"):
            call(tf.ones(1), average=True, op=hvd.Sum)


def check_factors(run):
    how = {"op": hvd.Sum, "prescale_factor": 0.5, "postscale_factor": 4.0}
    assert run(lambda x: hvd.allreduce(x, **how), mine(3)) == pytest.approx(2 * total())
    assert run(lambda x: hvd.grouped_allreduce([x], **how)[0], mine(3)) == pytest.approx(2 * total())
    assert run(lambda x: hvd.reducescatter(x, **how), mine(hvd.size())) == pytest.approx(2 * total())
    assert run(lambda x: hvd.grouped_reducescatter([x], **how)[0], mine(hvd.size())) == pytest.approx(2 * total())


def check_lists_of_any_kind(run):
    assert hvd.grouped_allreduce([]) == [] and hvd.grouped_reducescatter([]) == []
    got = run(lambda x, y, z: hvd.grouped_allreduce(iter((x, y, z)), op=hvd.Sum),
              mine(2), mine(3, 1, dtype=np.int64), mine(1, dtype=np.float64))
    assert [x.dtype for x in got] == [np.float32, np.int64, np.float64]
    assert [x.shape for x in got] == [(2,), (3, 1), (1,)]
    assert all((x == total()).all() for x in got)
    got = run(lambda x, y: hvd.grouped_reducescatter((x, y), op=hvd.Sum), mine(hvd.size()), mine(hvd.size(), 2))
    assert [x.shape for x in got] == [(1,), (1, 2)] and all((x == total()).all() for x in got)


def check_what_is_not_a_tensor_yet():
    rank = float(hvd.rank() + 1)
    sum_of = lambda x: hvd.allreduce(x, op=hvd.Sum).numpy().tolist()  # noqa: E731
    assert sum_of(rank) == total() and sum_of([rank, rank]) == [total()] * 2
    assert sum_of(np.array([rank])) == [total()] and sum_of(tf.Variable([rank])) == [total()]
    assert hvd.grouped_allreduce([rank, tf.Variable(rank)], op=hvd.Sum)[1].numpy() == total()
    assert hvd.reducescatter([rank] * hvd.size(), op=hvd.Sum, compression=hvd.Compression.fp16).numpy() == [total()]
    keras = tf.keras.Sequential([tf.keras.layers.Dense(1, kernel_initializer="ones")])
    keras.build((None, 2))
    for compression in (hvd.Compression.none, hvd.Compression.fp16):
        assert hvd.allreduce(keras.weights[0], op=hvd.Sum, compression=compression).numpy().tolist() == \
            [[hvd.size()]] * 2


@pytest.mark.parametrize("use_resource", [True, False])
def check_variables_of_v1(use_resource):
    def reduced():
        x = v1.Variable([hvd.rank() + 1.0], use_resource=use_resource)
        return [hvd.allreduce(x, op=hvd.Sum), hvd.allreduce(x, op=hvd.Sum, compression=hvd.Compression.fp16)]
    assert session(reduced) == [[total()], [total()]]


def check_devices():
    with tf.Graph().as_default() as graph:
        hvd.allreduce(v1.placeholder(tf.float32), device_dense="/cpu:0")
        hvd.grouped_reducescatter([v1.placeholder(tf.float32)], device_dense="/cpu:0")
        with tf.device("/cpu:0"):
            hvd.grouped_allreduce([v1.placeholder(tf.float32)])
        devices = [op.device for op in graph.get_operations() if is_ours(op)]
    assert len(devices) == 3 and set(devices) == {"/device:CPU:0"}


def check_device_of_the_caller():
    """Holds unless another one is asked for."""
    placed_anywhere = tf.config.get_soft_device_placement()
    tf.config.set_soft_device_placement(False)
    try:
        with tf.device("/device:GPU:7"):
            with pytest.raises(tf.errors.InvalidArgumentError, match="GPU:7"):
                hvd.allreduce([1.0])
            assert hvd.allreduce([1.0], device_dense="/cpu:0").numpy() == 1
    finally:
        tf.config.set_soft_device_placement(placed_anywhere)


def check_names():
    with tf.Graph().as_default() as graph:
        with tf.name_scope("scope"):
            grouped = lambda x, **how: hvd.grouped_allreduce([x], **how)  # noqa: E731
            for i, call in enumerate((hvd.allreduce, hvd.reducescatter, grouped)):
                call(v1.placeholder(tf.float32, [None]), name=f"inner{i}")
                call(v1.placeholder(tf.float32, [None]), name=f"outer{i}", ignore_name_scope=True)
        names = {op.name: op.get_attr("ignore_name_scope") for op in graph.get_operations() if is_ours(op)}
    assert names == {**{f"scope/inner{i}": 0 for i in range(3)}, **{f"scope/outer{i}": 1 for i in range(3)}}


# Compression

def check_compressors():
    assert hvd.Compression.none is NoneCompressor and hvd.Compression.fp16 is FP16Compressor
    assert issubclass(NoneCompressor, Compressor) and issubclass(FP16Compressor, Compressor)
    with pytest.raises(NotImplementedError):
        Compressor.compress(tf.ones(1))
    with pytest.raises(NotImplementedError):
        Compressor.decompress(tf.ones(1), None)
    for dtype in (tf.float16, tf.bfloat16, tf.float32, tf.float64):
        tensor = tf.reshape(tf.cast(tf.range(6), dtype), (2, 3))
        for name, wire in (("none", dtype), ("fp16", tf.float16), ("bf16", tf.bfloat16)):
            compressor = getattr(hvd.Compression, name)
            sent, context = compressor.compress(tensor)
            assert sent.dtype == wire and sent.shape == tensor.shape
            back = compressor.decompress(sent, context)
            assert back.dtype == dtype and tf.reduce_all(back == tensor)
    for dtype in (tf.uint8, tf.int8, tf.uint16, tf.int16, tf.int32, tf.int64, tf.bool, tf.complex64):
        tensor = tf.cast(tf.ones(3), dtype)
        for compressor in (hvd.Compression.none, hvd.Compression.fp16, hvd.Compression.bf16):
            sent, context = compressor.compress(tensor)
            assert sent is tensor
            assert compressor.decompress(sent, context) is tensor


@pytest.mark.parametrize("compression, value, expected", [
    (hvd.Compression.none, FINER, FINER), (hvd.Compression.fp16, FINE, FINE), (hvd.Compression.fp16, FINER, 1),
    (hvd.Compression.bf16, FINE, 1), (hvd.Compression.bf16, 2.0 ** 100, 2.0 ** 100)])
def check_compressed_reductions(run, compression, value, expected):
    """What travels is rounded to the wire's dtype, what comes back has the tensor's."""
    how = {"op": hvd.Min, "compression": compression}  # of equal values, so that nothing else rounds
    sent = np.full(hvd.size(), value, np.float32)
    got = [run(lambda x: hvd.allreduce(x, **how), sent),
           *run(lambda x: hvd.grouped_allreduce([x, x], **how), sent),
           run(lambda x: hvd.reducescatter(x, **how), sent),
           *run(lambda x: hvd.grouped_reducescatter([x], **how), sent)]
    for x in got:
        assert x.dtype == np.float32 and (x == expected).all()
    number = mine(2, dtype=np.int32)
    assert (run(lambda x: hvd.allreduce(x, op=hvd.Sum, compression=compression), number) == total()).all()


class Flat(Compressor):
    """A user's own: sends another shape, and is an instance."""

    def compress(self, tensor):
        return tf.cast(tf.reshape(tensor, [-1]), tf.float64) * 2, (tf.shape(tensor), tensor.dtype)

    def decompress(self, tensor, ctx):
        return tf.cast(tf.reshape(tensor, ctx[0]) / 2, ctx[1])


def check_compressor_of_a_user(run):
    for call in (lambda x: hvd.allreduce(x, op=hvd.Sum, compression=Flat()),
                 lambda x: hvd.grouped_allreduce([x], op=hvd.Sum, compression=Flat())[0]):
        got = run(call, mine(2, 3))
        assert got.dtype == np.float32 and got.shape == (2, 3) and (got == total()).all()


@pytest.mark.parametrize("compression", [hvd.Compression.none, hvd.Compression.fp16, hvd.Compression.bf16, Flat()],
                         ids=["none", "fp16", "bf16", "own"])
def check_gradients_pass_through(run, compression):
    """The derivative of a sum over ranks is the sum of what comes back to each."""
    def derivative(call):
        def of(x):
            return tf.gradients(call(x) * (hvd.rank() + 1), x)[0]
        return of if run is session else tf.function(of)
    how = {"op": hvd.Sum, "compression": compression}
    for call in (lambda x: hvd.allreduce(x, **how), lambda x: hvd.grouped_allreduce([x], **how)[0]):
        got = run(derivative(call), mine(2, 3))
        assert got.dtype == np.float32 and got == pytest.approx(np.full((2, 3), total()))


# The rest of the package

def check_variables_and_references():
    x, y, z = (tf.Variable(float(i)) for i in range(3))
    refs = hvd.vars_to_refs([x, [y, z]])
    assert refs == hvd.vars_to_refs([x, (y, z)]) != hvd.vars_to_refs([x, [z, y]])
    assert len({refs, hvd.vars_to_refs([x, [y, z]])}) == 1
    back = hvd.refs_to_vars(refs)
    assert back[0] is x and back[1][0] is y and back[1][1] is z
    assert hvd.refs_to_vars(hvd.vars_to_refs(x)) is x

    model = tf.keras.Sequential([tf.keras.layers.Dense(1)])  # Keras 3's variables have no ref() and no hash
    model.build((None, 2))
    refs = hvd.vars_to_refs(model.weights)
    assert refs == hvd.vars_to_refs(list(model.weights)) != hvd.vars_to_refs(model.weights[::-1])
    assert len({refs, hvd.vars_to_refs(model.weights)}) == 1
    assert all(a is b for a, b in zip(hvd.refs_to_vars(refs), model.weights))


def check_variable_of_tensorflow():
    x = tf.Variable(1.0)
    assert tf_variable(x) is x
    model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    model.build((None, 2))
    inner = tf_variable(model.weights[0])
    inner.assign([[1.0], [2.0]])
    assert model.get_weights()[0].tolist() == [[1], [2]]
    for wrong in (1.0, np.ones(1), tf.ones(1), None, "x", {"value": x}):
        with pytest.raises(ValueError, match="is no variable"):
            tf_variable(wrong)


def check_executing_eagerly(run):
    seen = []

    def function():
        seen.append(_executing_eagerly())
        return tf.constant(0)
    run(function)
    assert seen == [run is MODES["eager"]]


def check_names_that_are_not_there():
    with pytest.raises(AttributeError, match="no attribute 'allreduce_async'$"):
        hvd.allreduce_async  # noqa: B018
