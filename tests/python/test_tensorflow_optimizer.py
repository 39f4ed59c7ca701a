"""DistributedOptimizer around optimizers of tf.compat.v1, in graphs with a session and eagerly."""
import sys
import types

import numpy as np
import pytest
import tensorflow as tf
from tensorflow_training import SAMPLES, SHAPES, data, expect_close, loss_of, make_variables, mine

import lightcc.tensorflow as hvd
import ranks

pytestmark = pytest.mark.usefixtures("job")
v1 = tf.compat.v1
OPTIMIZERS = {
    "GradientDescent": lambda: v1.train.GradientDescentOptimizer(0.1),
    "Momentum": lambda: v1.train.MomentumOptimizer(0.1, 0.9),
    "Adagrad": lambda: v1.train.AdagradOptimizer(0.1),
    "RMSProp": lambda: v1.train.RMSPropOptimizer(0.01),
    "Adam": lambda: v1.train.AdamOptimizer(0.01),
}
KINDS = {"resource variables": True, "reference variables": False}


@pytest.mark.parametrize("np", (1, 2, 3))
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


@pytest.fixture(params=KINDS)
def resource(request):
    """Whether variables of the graph are resources. Those that are not go with the control flow of TensorFlow 1."""
    if not KINDS[request.param]:
        v1.disable_control_flow_v2()
    with tf.Graph().as_default():
        yield KINDS[request.param]
    v1.enable_control_flow_v2()


@pytest.fixture
def graph():
    with tf.Graph().as_default() as graph:
        yield graph


def momentum():
    return OPTIMIZERS["Momentum"]()


def started():
    """A session with what a script initializes."""
    session = v1.Session()
    session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
    return session


def train(optimizer, variables, batches, passes=1):
    """Trains in the graph and returns the variables' values; a batch is (words, targets)."""
    words, targets = v1.placeholder(tf.int64, [None, 2]), v1.placeholder(tf.float32, [None, 3])
    operation = optimizer.minimize(loss_of(variables, words, targets), var_list=variables)
    with started() as session:
        for batch in batches:
            session.run(operation, dict(zip((words, targets), batch)))
        return session.run(variables)


def trained_alone(make, batches, **options):
    """What one process has with the plain optimizer."""
    with tf.Graph().as_default():
        return train(make(), make_variables(use_resource=True), batches, **options)


def every(values):
    return hvd.allgather_object([value.tobytes() for value in values])


# Training

@pytest.mark.parametrize("kind", OPTIMIZERS)
def check_training_in_a_graph_equals_one_process(kind, resource):
    steps = range(4)
    got = train(hvd.DistributedOptimizer(OPTIMIZERS[kind]()), make_variables(use_resource=resource), map(mine, steps))
    expect_close(got, trained_alone(OPTIMIZERS[kind], map(data, steps)), 1e-4, 1e-5)
    assert len({tuple(values) for values in every(got)}) == 1


@pytest.mark.parametrize("kind", OPTIMIZERS)
def check_training_eagerly_equals_one_process(kind):
    variables = make_variables()
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS[kind]())
    for step in range(4):
        optimizer.minimize(lambda step=step: loss_of(variables, *mine(step)), var_list=variables)
    expect_close(variables, trained_alone(OPTIMIZERS[kind], map(data, range(4))), 1e-4, 1e-5)


@pytest.mark.parametrize("options", [
    {"sparse_as_dense": True}, {"groups": 2}, {"gradient_predivide_factor": 2.0}, {"device_dense": "/cpu:0"},
    {"compression": hvd.Compression.fp16}, {"name": "mine", "use_locking": True}], ids=lambda options: [*options][0])
def check_options(graph, options):
    plain = OPTIMIZERS["GradientDescent"]  # others do not touch what a sparse gradient leaves out
    got = train(hvd.DistributedOptimizer(plain(), **options), make_variables(use_resource=True), map(mine, range(3)))
    rtol = 1e-2 if "compression" in options else 1e-5
    expect_close(got, trained_alone(plain, map(data, range(3))), rtol, rtol)


def check_groups_of_variables(graph):
    variables = make_variables(use_resource=True)
    got = train(hvd.DistributedOptimizer(momentum(), groups=[variables[1:]]), variables, map(mine, range(3)))
    expect_close(got, trained_alone(momentum, map(data, range(3))))


def check_sum(graph):
    x = v1.Variable([1.0, 2.0], use_resource=True)
    pairs = hvd.DistributedOptimizer(momentum(), op=hvd.Sum).compute_gradients(tf.reduce_sum(x) * (hvd.rank() + 1.0))
    assert [variable for _, variable in pairs] == [x]
    with started() as session:
        assert session.run(pairs[0][0]).tolist() == [hvd.size() * (hvd.size() + 1) / 2] * 2


@pytest.mark.parametrize("average", [False, True])
def check_backward_passes_per_step(resource, average):
    """Four passes a step, over the batches of two steps: as one process on batches four times as large."""
    passes, steps = 4, 2
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS["GradientDescent"](), backward_passes_per_step=passes,
                                         sparse_as_dense=True, average_aggregated_gradients=average)
    got = train(optimizer, make_variables(use_resource=resource), map(mine, range(passes * steps)))

    def large(step):
        batches = [data(passes * step + i) for i in range(passes)]
        return [np.concatenate(parts) for parts in zip(*batches)]

    def plain():  # a sum of gradients is that of the mean at a higher rate
        return v1.train.GradientDescentOptimizer(0.1 * (1 if average else passes))
    expect_close(got, trained_alone(plain, map(large, range(steps))), 1e-4, 1e-5)


def check_global_step_counts_every_pass(graph):
    x, step = v1.Variable(1.0, use_resource=True), v1.train.get_or_create_global_step()
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS["GradientDescent"](), backward_passes_per_step=3)
    operation = optimizer.minimize(x * (hvd.rank() + 1.0), global_step=step)
    assert isinstance(operation, tf.Operation)
    with started() as session:
        for i in range(1, 8):
            session.run(operation)
            got = session.run([x, step])
            assert got == [pytest.approx(1 - (i // 3) * 0.3 * (hvd.size() + 1) / 2), i]


def check_gradients_may_be_changed_between_compute_and_apply(resource):
    x = v1.Variable([3.0, 4.0], use_resource=resource)
    optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0), backward_passes_per_step=2)
    pairs = optimizer.compute_gradients(tf.reduce_sum(x * [30.0, 40.0]))
    clipped = [(tf.clip_by_norm(grad, 1.0), variable) for grad, variable in pairs]
    operation = optimizer.apply_gradients(clipped)
    with started() as session:
        for _ in range(2):
            session.run(operation)
        np.testing.assert_allclose(session.run(x), [2.4, 3.2], rtol=1e-6)


def check_two_optimizers_in_one_graph(graph):
    """As in adversarial training, in one call of the session."""
    for passes in (1, 2):  # with 2 they are in branches, which have graphs of their own
        xs = [v1.Variable(tf.ones(i + 1), use_resource=True) for i in range(2)]
        operations = [hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0), backward_passes_per_step=passes)
                      .minimize(tf.reduce_sum(x) * (hvd.rank() + 1.0), var_list=[x]) for x in xs]
        with started() as session:
            for _ in range(4):
                session.run(operations)
            for got in session.run(xs):
                np.testing.assert_allclose(got, 1 - 4 * (hvd.size() + 1) / 2, rtol=1e-6)


# It is the optimizer that it wraps

def check_slots_and_checkpoints_are_the_plain_ones(graph):
    variables = make_variables(use_resource=True)
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS["Adam"](), backward_passes_per_step=2, sparse_as_dense=True)
    assert isinstance(optimizer, v1.train.Optimizer)
    assert optimizer.get_name() == "DistributedAdamOptimizer"
    optimizer.minimize(loss_of(variables, *mine(0)), var_list=variables)
    assert optimizer.get_slot_names() == ["m", "v"]
    assert optimizer.get_slot(variables[1], "m").shape == SHAPES["weight"]
    names = {variable.op.name for variable in v1.global_variables()}
    with tf.Graph().as_default():
        plain, variables = OPTIMIZERS["Adam"](), make_variables(use_resource=True)
        plain.minimize(loss_of(variables, *mine(0)), var_list=variables)
        assert names == {variable.op.name for variable in v1.global_variables()}
        expected = {variable.op.name for variable in plain.variables()}
    assert {variable.op.name for variable in optimizer.variables()} == expected


def check_a_monitored_session_starts_it(graph):
    x, step = v1.Variable(1.0, use_resource=True), v1.train.get_or_create_global_step()
    optimizer = hvd.DistributedOptimizer(momentum(), backward_passes_per_step=2)
    operation = optimizer.minimize(x * x, global_step=step)
    done = 0
    with v1.train.MonitoredTrainingSession(hooks=[v1.train.StopAtStepHook(last_step=4)]) as session:
        while not session.should_stop():
            session.run(operation)
            done += 1
    assert done == 4


# Local variables

@pytest.mark.parametrize("scale", [True, False])
@pytest.mark.parametrize("passes", [1, 2])
def check_local_variables(resource, scale, passes):
    x, own = (v1.Variable(0.0, use_resource=resource) for _ in range(2))
    optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0), scale_local_gradients=scale,
                                         backward_passes_per_step=passes)
    optimizer.register_local_var(own)
    operation = optimizer.minimize((x + own) * (hvd.rank() + 1.0), var_list=[own, x])
    with started() as session:
        for _ in range(passes):
            session.run(operation)
        got = session.run([x, own])
    mine = passes * (hvd.rank() + 1) / (hvd.size() if scale else 1)
    np.testing.assert_allclose(got, [-passes * (hvd.size() + 1) / 2, -mine], rtol=1e-6)


def check_process_set(graph):
    some = hvd.add_process_set(range(hvd.size() - 1)) if hvd.size() > 1 else hvd.global_process_set
    x = v1.Variable(0.0, use_resource=True)
    optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0), process_set=some)
    operation = optimizer.minimize(x * (hvd.rank() + 1.0))
    with started() as session:
        session.run(operation)
        got = session.run(x)
    assert got == (-np.mean([rank + 1 for rank in some.ranks]) if some.included() else -(hvd.rank() + 1))
    hvd.remove_process_set(some)


# Adasum

def combined(vectors):
    """Adasum of two ranks' vectors, or the only one."""
    if len(vectors) == 1:
        return vectors[0]
    a, b = vectors
    dot = a @ b
    return (1 - dot / (2 * (a @ a))) * a + (1 - dot / (2 * (b @ b))) * b


@pytest.mark.parametrize("passes", [1, 3])
def check_adasum_combines_steps(resource, passes):
    """Each rank makes its own steps; then what they have changed is combined."""
    if hvd.size() > 2:
        return
    targets = np.random.RandomState(5).standard_normal((hvd.size(), 4)).astype(np.float32)
    x, y = (v1.Variable(tf.ones(4), use_resource=resource) for _ in range(2))
    loss = tf.reduce_sum((x - targets[hvd.rank()]) ** 2 + (y + targets[hvd.rank()]) ** 2)
    optimizer = hvd.DistributedOptimizer(momentum(), op=hvd.Adasum, backward_passes_per_step=passes)
    step = v1.train.get_or_create_global_step()
    operation = optimizer.minimize(loss, global_step=step)

    def expected(sign, rounds):
        value, velocities = np.ones(4), np.zeros((hvd.size(), 4))
        for _ in range(rounds):
            changed = np.tile(value, (hvd.size(), 1))
            for _ in range(passes):
                velocities = 0.9 * velocities + 2 * (changed - sign * targets)
                changed = changed - 0.1 * velocities
            value = value + combined(list(changed - value))
        return value

    with started() as session:
        for rounds in range(1, 4):
            for _ in range(passes):
                session.run(operation)
            expect_close(session.run([x, y]), [expected(1, rounds), expected(-1, rounds)], 1e-4, 1e-5)
        assert session.run(step) == 3 * passes


def check_adasum_eagerly():
    x = tf.Variable([1.0, 1.0])
    optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(0.5), op=hvd.Adasum)
    for _ in range(2):
        optimizer.minimize(lambda: tf.reduce_sum(x), var_list=[x])
    np.testing.assert_allclose(x.numpy(), [0, 0], atol=1e-6)  # steps that are alike stay as they are


# Errors

def check_wrong_arguments(graph):
    x = v1.Variable(1.0, use_resource=True)
    for wrong in (0, -1, 1.5, "2", (x,), [x], [[1]], [[x], [x]]):
        with pytest.raises(ValueError, match="groups"):
            hvd.DistributedOptimizer(momentum(), groups=wrong)
    with pytest.warns(DeprecationWarning, match="num_groups"):
        hvd.DistributedOptimizer(momentum(), num_groups=2)
    for op in (hvd.Sum, hvd.Adasum):
        with pytest.raises(ValueError, match="gradient_predivide_factor"):
            hvd.DistributedOptimizer(momentum(), op=op, gradient_predivide_factor=2.0)
    for passes in (0, -1):
        with pytest.raises(ValueError, match="backward_passes_per_step"):
            hvd.DistributedOptimizer(momentum(), backward_passes_per_step=passes)
    for wrong in (None, "SGD", x, v1.train.GradientDescentOptimizer):
        with pytest.raises(ValueError, match="wraps"):
            hvd.DistributedOptimizer(wrong)
    for op in (hvd.Average, hvd.Adasum):
        with pytest.raises(ValueError, match="already"):
            hvd.DistributedOptimizer(hvd.DistributedOptimizer(momentum(), op=op))


def check_wrong_arguments_with_adasum(graph):
    with pytest.raises(ValueError, match="average_aggregated_gradients"):
        hvd.DistributedOptimizer(momentum(), op=hvd.Adasum, average_aggregated_gradients=True)
    with pytest.raises(ValueError, match="register_local_var"):
        hvd.DistributedOptimizer(momentum(), op=hvd.Adasum).register_local_var(v1.Variable(1.0))
    if hvd.size() > 1:
        some = hvd.add_process_set([0])
        with pytest.raises(NotImplementedError, match="process set"):
            hvd.DistributedOptimizer(momentum(), op=hvd.Adasum, process_set=some)
        hvd.remove_process_set(some)


def check_keras_optimizers_are_passed_on_with_every_argument(monkeypatch):
    """test_keras_optimizer.py checks what comes out."""
    passed = {}
    keras = types.SimpleNamespace(DistributedOptimizer=lambda optimizer, **options: passed.update(options) or optimizer)
    monkeypatch.setitem(sys.modules, "lightcc.tensorflow.keras", keras)
    optimizer = tf.keras.optimizers.SGD(0.1)
    options = {"name": "mine", "device_dense": "/cpu:0", "device_sparse": "/cpu:0", "sparse_as_dense": True,
               "groups": 3, "compression": hvd.Compression.fp16, "backward_passes_per_step": 2, "op": hvd.Average,
               "gradient_predivide_factor": 2.0, "average_aggregated_gradients": True, "scale_local_gradients": False,
               "process_set": hvd.global_process_set}
    assert hvd.DistributedOptimizer(optimizer, use_locking=True, **options) is optimizer
    assert passed == options


def check_keras_optimizers_have_no_adasum():
    with pytest.raises(ValueError, match="Adasum"):
        hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.1), op=hvd.Adasum)


def check_passes_eagerly():
    with pytest.raises(ValueError, match="eager"):
        hvd.DistributedOptimizer(momentum(), backward_passes_per_step=2)


def check_sparse_gradients_are_not_added_up(graph):
    variables = make_variables(use_resource=True)
    optimizer = hvd.DistributedOptimizer(momentum(), backward_passes_per_step=2)
    with pytest.raises(ValueError, match="embedding.*sparse_as_dense"):
        optimizer.minimize(loss_of(variables, *mine(0)), var_list=variables)


def check_disagreement_names_the_gradient_and_the_next_step_works(graph):
    if hvd.size() == 1:
        return
    x, y = v1.Variable(tf.ones(2 + hvd.rank() % 2), use_resource=True), v1.Variable(1.0, use_resource=True)
    wrong, right = (hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0)).minimize(
        tf.reduce_sum(variable), var_list=[variable]) for variable in (x, y))
    with started() as session:
        with pytest.raises(tf.errors.FailedPreconditionError, match="DistributedGradientDescentOptimizer.*gradient_0"):
            session.run(wrong)
        session.run(right)
        assert session.run(y) == 0


def check_samples():
    """What the checks take for the global batch is that of all ranks."""
    assert [len(part) for part in data(0)] == [hvd.size() * SAMPLES] * 2
