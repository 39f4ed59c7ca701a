"""broadcast_variables and what is made of it; objects. In eager mode, in a tf.function and in a v1 session."""
import numpy as np
import pytest
import tensorflow as tf
from modes import MODES, session, v1

import lightcc.tensorflow as hvd
import ranks

pytestmark = pytest.mark.usefixtures("job")
DTYPES = ("uint8", "int8", "uint16", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64", "bool",
          "uint32", "uint64", "complex64", "complex128")


@pytest.mark.parametrize("np", (1, 3))
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


@pytest.fixture(params=MODES.values(), ids=MODES)
def run(request):
    return request.param


def value_of(rank, shape, dtype):
    return tf.cast(tf.reshape((tf.range(int(np.prod(shape))) + rank) % 3, shape), dtype)


def variables_of(rank):
    """A variable of each dtype, a scalar, and one without elements."""
    return [tf.Variable(value_of(rank, (2, 3), dtype)) for dtype in DTYPES] + \
        [tf.Variable(float(rank)), tf.Variable(1j * rank), tf.Variable(tf.zeros([0, 3]))]


def as_numpy(tensors):
    return [tensor.numpy() for tensor in tensors]


def expect_equal(got, expected):
    assert len(got) == len(expected) > 0
    for a, b in zip(got, expected):
        assert (a.dtype, a.shape) == (b.dtype, b.shape) and (a == b).all(), (a, b)


# Variables

def check_broadcast_variables():
    for root in range(hvd.size()):
        mine, theirs = variables_of(hvd.rank()), as_numpy(variables_of(root))
        assert hvd.broadcast_variables(mine, root, inplace=root == 0) is None
        expect_equal(as_numpy(mine), theirs)


def check_broadcast_variables_in_a_function():
    root = hvd.size() - 1
    mine, theirs = variables_of(hvd.rank()), as_numpy(variables_of(root))

    @tf.function
    def step():
        hvd.broadcast_variables(mine, root_rank=root)
    step()
    expect_equal(as_numpy(mine), theirs)


@pytest.mark.parametrize("use_resource", [True, False])
def check_broadcast_variables_in_a_session(use_resource):
    root = hvd.size() - 1
    dtypes = DTYPES if use_resource else [dtype for dtype in DTYPES if dtype not in ("uint32", "uint64")]
    with tf.Graph().as_default(), v1.Session() as running:
        values = [value_of(hvd.rank(), (2, 3), dtype) for dtype in dtypes]
        mine = [v1.Variable(value, use_resource=use_resource) for value in values]
        expected = [v1.Variable(value_of(root, (2, 3), dtype), use_resource=use_resource) for dtype in dtypes]
        broadcast = hvd.broadcast_variables(mine, root)
        assert isinstance(broadcast, tf.Operation)
        for operation in (broadcast, hvd.broadcast_(mine, root)):
            running.run(v1.global_variables_initializer())
            running.run(operation)
            expect_equal(running.run(mine), running.run(expected))


def check_new_values_are_returned(run):
    """By broadcast_, which overwrites too."""
    made = []

    def overwritten():
        if not made:  # a function makes its variables once
            made.extend([v1.Variable([hvd.rank()], name="x"), v1.Variable([[hvd.rank() + 0.5]])])
        return hvd.broadcast_(made, hvd.size() - 1, name="mine")
    first, second = run(overwritten)
    assert first.tolist() == [hvd.size() - 1] and second.tolist() == [[hvd.size() - 0.5]]
    if run is not session:
        assert made[0].numpy().tolist() == [hvd.size() - 1] and made[1].numpy().tolist() == [[hvd.size() - 0.5]]


def check_variables_of_keras():
    """Keras 3's are none of TensorFlow's, and the seed of its Dropout has an integer type of its own."""
    model = tf.keras.Sequential([tf.keras.layers.Dense(3), tf.keras.layers.BatchNormalization(),
                                 tf.keras.layers.Dropout(0.1), tf.keras.layers.Dense(1)])
    model.build((None, 2))
    for weights in (model.variables, model.trainable_variables):
        model.set_weights([np.full_like(weight, hvd.rank() + i) for i, weight in enumerate(model.get_weights())])
        hvd.broadcast_variables(weights, root_rank=hvd.size() - 1)
        names = {id(weight) for weight in weights}
        for i, weight in enumerate(model.weights):
            rank = hvd.size() - 1 if id(weight) in names else hvd.rank()
            assert (weight.numpy() == rank + i).all()


def check_in_the_first_step_of_a_function():
    """As many scripts do: what the optimizer has made in the first step is sent too."""
    x, optimizer = tf.Variable([1.0, 2.0]), tf.keras.optimizers.SGD(0.5 * (hvd.rank() + 1), momentum=0.9)

    @tf.function
    def step(first):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(x * x) * (hvd.rank() + 1)
        gradients = tape.gradient(loss, [x])
        optimizer.apply_gradients(zip([hvd.allreduce(gradients[0])], [x]))
        if first:
            hvd.broadcast_variables([x], root_rank=0)
            variables = optimizer.variables
            hvd.broadcast_variables(variables() if callable(variables) else variables, root_rank=0)
    step(True)
    optimizer.learning_rate = 0.5
    step(False)
    for values in hvd.allgather_object(x.numpy().tolist()):
        assert values == pytest.approx(x.numpy().tolist())


def check_what_is_no_variable():
    for wrong in ([1.0], [tf.ones(1)], [np.ones(1)], [None], ["x"], [tf.Variable(1.0), {}]):
        with pytest.raises(ValueError, match="is no variable"):
            hvd.broadcast_variables(wrong, root_rank=0)
    with pytest.raises(ValueError, match="text.*broadcast_object"):
        hvd.broadcast_variables([tf.Variable(1.0), tf.Variable("a", name="text")], root_rank=0)
    hvd.broadcast_variables([], root_rank=0)
    with pytest.raises(tf.errors.InvalidArgumentError, match="root"):
        hvd.broadcast_variables([tf.Variable(1.0)], root_rank=hvd.size())


def check_process_sets():
    if hvd.size() == 1:
        return
    others = hvd.add_process_set(list(range(1, hvd.size())))
    x = tf.Variable(hvd.rank())
    if others.included():
        hvd.broadcast_variables([x], root_rank=hvd.size() - 1, process_set=others)
    assert x.numpy() == (hvd.size() - 1 if others.included() else 0)
    hvd.remove_process_set(others)


def check_disagreement():
    """The ranks' variables have other shapes: every rank is told, and the next call works."""
    if hvd.size() == 1:
        return
    with pytest.raises(tf.errors.FailedPreconditionError, match="broadcast_variables.1.*disagree"):
        hvd.broadcast_variables([tf.Variable(1.0), tf.Variable(tf.ones(2 + hvd.rank()))], root_rank=0)
    x = tf.Variable(hvd.rank())
    hvd.broadcast_variables([x], root_rank=0)
    assert x.numpy() == 0


# Programs in the style of TensorFlow 1

def check_global_variables():
    with pytest.raises(RuntimeError, match="hvd.broadcast_variables"):
        hvd.broadcast_global_variables(0)
    with tf.Graph().as_default(), v1.Session() as running:
        x = v1.get_variable("x", initializer=float(hvd.rank()))
        local = v1.get_variable("y", initializer=float(hvd.rank()), collections=[v1.GraphKeys.LOCAL_VARIABLES])
        running.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
        running.run(hvd.broadcast_global_variables(hvd.size() - 1))
        assert running.run([x, local]) == [hvd.size() - 1, hvd.rank()]


@pytest.mark.parametrize("device", ["", "/cpu:0"])
def check_hook(device):
    """Also with a second graph, as tf.estimator had one for each call."""
    hook = hvd.BroadcastGlobalVariablesHook(hvd.size() - 1, device)
    assert isinstance(hook, v1.train.SessionRunHook)
    for i in range(2):
        with tf.Graph().as_default() as graph:
            x = v1.get_variable("x", initializer=float(hvd.rank() + i))
            step = v1.assign_add(x, 1.0)
            with v1.train.MonitoredTrainingSession(hooks=[hook]) as running:
                assert running.run(x) == hvd.size() - 1 + i
                running.run(step)
                assert running.run(x) == hvd.size() + i
            broadcasts = [op.device for op in graph.get_operations() if op.type == "HorovodBroadcast"]
            assert broadcasts == (["/device:CPU:0"] if device else [""])


def check_hook_in_eager_mode():
    with pytest.raises(RuntimeError, match="eager"):
        hvd.BroadcastGlobalVariablesHook(0).begin()


def check_hook_after_a_checkpoint(tmp_path):
    """Where the root goes on from its checkpoint, all do."""
    checkpoints = str(tmp_path) if hvd.rank() == 0 else None
    for begin in (0, 3):
        with tf.Graph().as_default():
            step = v1.train.get_or_create_global_step()
            x = v1.get_variable("x", initializer=float(hvd.rank()))
            work = v1.group(v1.assign_add(step, 1), v1.assign_add(x, 1.0))
            with v1.train.MonitoredTrainingSession(checkpoint_dir=checkpoints, save_summaries_steps=None,
                                                   save_summaries_secs=None, log_step_count_steps=None,
                                                   hooks=[hvd.BroadcastGlobalVariablesHook(0)]) as running:
                assert running.run([step, x]) == [begin, begin]
                for _ in range(3):
                    running.run(work)


# Objects

def check_objects(run):
    """The same wherever they are sent: in a graph that is being built, too."""
    seen = []

    def send():
        last = hvd.size() - 1
        seen.append(hvd.broadcast_object({"rank": hvd.rank()}, root_rank=last))
        seen.append(hvd.broadcast_object_fn(last, name="mine")([hvd.rank()]))
        seen.append(hvd.allgather_object("x" * hvd.rank(), name="other"))
        return tf.constant(0)
    run(send)
    assert seen == [{"rank": hvd.size() - 1}, [hvd.size() - 1], ["x" * rank for rank in range(hvd.size())]]


def check_objects_with_a_session():
    with tf.Graph().as_default(), v1.Session() as running:
        assert hvd.broadcast_object(hvd.rank(), 0, running) == 0
        assert hvd.broadcast_object_fn(0, running)(hvd.rank()) == 0
        assert hvd.allgather_object(hvd.rank(), running) == list(range(hvd.size()))


def check_objects_of_process_sets():
    if hvd.size() == 1:
        return
    last = hvd.add_process_set([hvd.size() - 1])
    if last.included():
        assert hvd.broadcast_object("here", hvd.size() - 1, process_set=last) == "here"
        assert hvd.broadcast_object_fn(hvd.size() - 1, process_set=last)("here") == "here"
        assert hvd.allgather_object("here", process_set=last) == ["here"]
    hvd.remove_process_set(last)


def check_tensors_inside_objects():
    got = hvd.broadcast_object({"x": tf.constant([hvd.rank(), 2])}, hvd.size() - 1)
    assert got["x"].numpy().tolist() == [hvd.size() - 1, 2]
