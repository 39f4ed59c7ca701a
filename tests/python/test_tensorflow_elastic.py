"""Elastic training's part for TensorFlow alone: the state of variables, eagerly and in sessions, and which errors are a
lost worker's."""
import numpy as np
import pytest
import tensorflow as tf
from modes import v1

import lightcc.tensorflow as hvd
import ranks
from lightcc.core.elastic_state import HorovodInternalError
from lightcc.tensorflow._library import LostError

pytestmark = pytest.mark.usefixtures("job")


@pytest.mark.parametrize("np", (2,))
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


class Eager:
    def __init__(self):
        self.variables = [tf.Variable([1.0, 2.0]), tf.Variable(3, dtype=tf.int64), tf.Variable(4.0, dtype=tf.bfloat16)]
        self.state = hvd.elastic.TensorFlowState(self.variables, batch=0)

    def set(self, value):
        for variable in self.variables:
            variable.assign(tf.cast(tf.fill(variable.shape, value), variable.dtype))

    def get(self):
        return [np.float64(variable.numpy()).tolist() for variable in self.variables]


class Session:
    """Global variables of a graph that is finalized, by the default session or a given one."""

    def __init__(self, given):
        with tf.Graph().as_default() as graph:
            self.variables = [v1.get_variable("x", initializer=[1.0, 2.0], use_resource=given),
                              v1.Variable(tf.constant(3, tf.int64)), v1.Variable(tf.constant(4.0, tf.bfloat16))]
            initial = v1.global_variables_initializer()
            self.fed = [v1.placeholder(variable.dtype.base_dtype) for variable in self.variables]
            self.assigned = [v1.assign(variable, tf.fill(variable.shape, fed))
                             for variable, fed in zip(self.variables, self.fed)]
            graph.finalize()
            self.session = v1.Session(graph=graph)
            self.session.run(initial)
            if given:
                self.state = hvd.elastic.TensorFlowState(session=self.session, batch=0)
            else:
                with self.session.as_default():
                    self.state = hvd.elastic.TensorFlowState(batch=0)

    def set(self, value):
        self.session.run(self.assigned, dict.fromkeys(self.fed, value))

    def get(self):
        return [np.float64(value).tolist() for value in self.session.run(self.variables)]


@pytest.mark.parametrize("make", [Eager, lambda: Session(True), lambda: Session(False)], ids=["eager", "given", "own"])
def check_what_is_committed_restored_and_synced(make):
    kept = make()
    first = kept.get()
    assert first == [[1, 2], 3, 4]
    kept.set(7)
    kept.state.batch = 1
    kept.state.restore()
    assert kept.get() == first and kept.state.batch == 0
    kept.set(8)
    kept.state.batch = 2
    kept.state.commit()
    kept.set(9)
    kept.state.restore()
    assert kept.get() == [[8, 8], 8, 8] and kept.state.batch == 2
    kept.set(10 + hvd.rank())
    kept.state.batch = 10 + hvd.rank()
    kept.state.save()
    kept.state.sync()
    assert kept.get() == [[10, 10], 10, 10] and kept.state.batch == 10
    kept.set(11)
    kept.state.restore()
    assert kept.get() == [[10, 10], 10, 10]


def check_sync_of_ranks_that_differ():
    state = hvd.elastic.TensorFlowState([tf.Variable(0.0)] * (1 + hvd.rank()))
    if hvd.size() == 1:
        return state.sync()
    with pytest.raises(ValueError, match="TensorFlowState: the ranks' variables differ: rank 0 has 1 and rank 1 has 2"):
        state.sync()


def check_a_state_of_values_alone():
    state = hvd.elastic.TensorFlowState(epoch=1)
    state.epoch = 2
    state.restore()
    state.sync()
    assert state.epoch == 1


def check_variables_of_a_graph_without_a_session():
    with tf.Graph().as_default():
        v1.get_variable("x", initializer=1.0)
        with pytest.raises(ValueError, match="TensorFlowState: variables of a graph live in a session; give session="):
            hvd.elastic.TensorFlowState()


def check_sums_of_a_v1_optimizer_belong_to_a_world():
    for leave in ("restore", "on_reset"):
        with tf.Graph().as_default(), v1.Session() as session:
            x = v1.get_variable("x", initializer=0.0, use_resource=True)
            gradient = v1.placeholder(tf.float32, [])
            optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0), backward_passes_per_step=2,
                                                 op=hvd.Sum)
            step = optimizer.apply_gradients(optimizer.compute_gradients(x * gradient, [x]))
            session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
            state = hvd.elastic.TensorFlowState([x], session)
            for value in (4.0, 1.0, 2.0):
                session.run(step, {gradient: value})
                if value == 4.0:
                    getattr(state, leave)()
            assert session.run(x) == -3.0 * hvd.size()


LOST = tf.errors.UnknownError(None, None, "Graph execution error:\n\n{{node Horovod}} HorovodAllreduce on rank 1: "
                                          "allreduce of tensor 'x': rank 0 (pid 7) on host h died")


class Failing:
    """A function that is trained: it fails once, or a reset callback does."""

    def __init__(self, monkeypatch, error, where="step"):
        monkeypatch.setattr(hvd.elastic, "_reset", lambda: None)
        self.errors = {where: [error]}
        self.state = hvd.elastic.TensorFlowState(step=0)
        self.state.register_reset_callbacks([lambda: self.fail("reset callback")])
        if where != "step":
            self.errors["step"] = [HorovodInternalError("a peer died")]

    def fail(self, where):
        if self.errors.get(where):
            raise self.errors[where].pop()

    def run(self):
        @hvd.elastic.run
        def train(state):
            state.step += 1
            self.fail("step")
            return state.step

        return train(self.state)


@pytest.mark.parametrize("where", ["step", "reset callback"])
def check_a_lost_rank_in_a_graph_takes_the_state_back(where, monkeypatch):
    assert Failing(monkeypatch, LOST, where).run() == 1


def check_a_rank_lost_in_a_lookup_does_so_too(monkeypatch):
    lost = tf.errors.UnknownError(None, None, "LightccEmbeddingLookup on rank 1: rank 0 died")
    assert Failing(monkeypatch, lost).run() == 1


@pytest.mark.parametrize("error", [
    tf.errors.UnknownError(None, None, "ValueError: of the user's generator, HorovodDataset"),
    tf.errors.FailedPreconditionError(None, None, "HorovodAllreduce on rank 1: the ranks disagree"),
    ValueError("of the user")], ids=repr)
def check_other_errors_pass(error, monkeypatch):
    with pytest.raises(type(error)) as caught:
        Failing(monkeypatch, error).run()
    assert caught.value is error


def check_the_error_of_an_eager_call_can_be_made_again():
    """As Keras does with those of a layer."""
    error = LostError(None, None, "HorovodAllreduce on rank 1: rank 0 died")
    again = type(error)(error.node_def, error.op, "in a layer: " + error.message, error.error_code)
    assert isinstance(again, HorovodInternalError) and again.message == "in a layer: " + error.message


def traced(**options):
    """A function of a step, for a weight of 1, that gives the average gradient; traced now."""
    weight = tf.Variable(1.0)

    @tf.function
    def step(x):
        with hvd.DistributedGradientTape(tf.GradientTape(), **options) as tape:
            loss = weight * x
        return tape.gradient(loss, weight)

    step.get_concrete_function(tf.TensorSpec([]))
    return step


def check_a_step_may_be_traced_before_init_in_an_elastic_job(monkeypatch, job):
    hvd.shutdown()
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    try:
        step = traced()
        for options, knob in (({"compression": hvd.Compression.topk(0.1)}, "0"), ({}, "1")):
            monkeypatch.setenv("LIGHT_TOPK_ALLREDUCE", knob)
            with pytest.raises(ValueError, match="lightcc is not initialised"):  # so that it is not traced without
                traced(**options)
        monkeypatch.delenv("LIGHT_TOPK_ALLREDUCE")
    finally:
        job.init()
    assert float(step(tf.constant(float(hvd.rank())))) == (hvd.size() - 1) / 2
