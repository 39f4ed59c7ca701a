"""The operations for TensorFlow: what TensorFlow may do with them and what not, whatever version it is."""
import ctypes
import re
from pathlib import Path

import numpy
import psutil
import pytest
import tensorflow as tf

import lightcc.tensorflow.mpi_ops as hvd
import ranks
from lightcc.core import lib

HEADER = Path(__file__).parents[2] / "csrc/api/tensorflow/c_api.h"
MANY = 64
STEPS = 10_000
GROWTH = 4 << 20  # of a process, over STEPS


@pytest.mark.parametrize("np", ranks.SIZES)
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


def requests():
    return lib.counters()["requests"]


@pytest.mark.parametrize("name", re.findall(r"  F\([^,]+, (\w+),", HEADER.read_text()))
def test_tensorflow_has_the_function(name):
    library = Path(tf.sysconfig.get_lib()) / "libtensorflow_framework.so.2"
    assert getattr(ctypes.CDLL(str(library)), f"TF_{name}")


def test_the_header_was_read():
    assert len(re.findall(r"  F\(", HEADER.read_text())) > 40


def check_many_are_in_flight_together(job):
    """As stateful operations they would be one after the other."""
    @tf.function
    def step(x):
        return tf.add_n([hvd._allreduce(x * i) for i in range(MANY)])

    step.get_concrete_function(tf.TensorSpec([3], tf.float32))
    for _ in range(3):  # of the others one may be so fast that not all of ours come before its own
        hvd.barrier()
        assert step(tf.ones(3)).numpy().tolist() == [job.size() * MANY * (MANY - 1) / 2] * 3
    most = max(job.allgather(numpy.array([lib.counters()["most_in_flight"]])))
    assert most >= MANY if job.size() > 1 else most > 1


def check_a_collective_on_constants_runs_at_every_call(job):
    @tf.function
    def step():
        return hvd._allreduce(tf.constant([1.0])) + hvd._allreduce(tf.ones(1) * 2)

    assert step().numpy() == 3 * job.size()
    before = requests()
    for _ in range(5):
        step()
    assert requests() - before == 10


def check_equal_calls_are_not_merged(job):
    @tf.function
    def step(x):
        return hvd._allreduce(x) + hvd._allreduce(x) + hvd._allreduce(x, name="named") + hvd._allreduce(x, name="named")

    before = requests()
    assert step(tf.ones(1)).numpy() == 4 * job.size()
    assert requests() - before == 4


def check_what_nobody_needs_is_not_sent(job):
    @tf.function
    def step(x):
        hvd._allreduce(x)
        return hvd._allreduce(2 * x)

    before = requests()
    assert step(tf.ones(1)).numpy() == 2 * job.size()
    assert requests() - before == 1


def check_a_session_runs_constants_and_equal_calls_too(job):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        one, same = hvd._allreduce(tf.constant([1.0])), hvd._allreduce(tf.constant([1.0]))
        for _ in range(3):
            before = requests()
            assert [float(x[0]) for x in session.run([one, same])] == [job.size()] * 2
            assert requests() - before == 2


def check_a_function_that_is_called_twice(job):
    @tf.function
    def inner(x):
        return hvd._allreduce(x)

    @tf.function
    def outer(x):
        return inner(x) + 10 * inner(2 * x)

    assert outer(tf.ones(2)).numpy().tolist() == [21 * job.size()] * 2


def check_a_loop_whose_turns_depend_on_each_other(job):
    @tf.function
    def loop(x):
        for i in tf.range(50):
            x += hvd._allreduce(tf.cast(i, tf.float32), op=hvd.Average)
        return x

    assert loop(tf.constant(0.0)).numpy() == 50 * 49 / 2


def check_a_loop_whose_turns_run_together(job):
    @tf.function
    def loop(x):
        return tf.map_fn(hvd._allreduce, x, parallel_iterations=10)

    assert loop(tf.range(50.0)).numpy().tolist() == [i * job.size() for i in range(50)]


def check_a_branch(job):
    @tf.function
    def choose(x):
        return hvd._allreduce(x) if tf.reduce_sum(x) > 0 else x

    assert choose(tf.ones(1)).numpy() == job.size()
    assert choose(-tf.ones(1)).numpy() == -1


def check_shapes_are_known_while_the_graph_is_built(job):
    @tf.function
    def build(x, y):
        assert hvd._allreduce(x).shape == [None, 3] and hvd.broadcast(y, 0).shape == [4, 3]
        assert hvd.allgather(y).shape.as_list() == [None, 3] and hvd._reducescatter(y).shape.as_list() == [None, 3]
        assert [t.shape.as_list() for t in hvd.grouped_allgather([x, y])] == [[None, 3]] * 2
        output, received = hvd.alltoall(y, [4] + [0] * (job.size() - 1))
        assert output.shape.as_list() == [None, 3] and received.shape.as_list() == [None]
        return output

    build.get_concrete_function(tf.TensorSpec([None, 3]), tf.TensorSpec([4, 3]))


def check_ranks_of_unknown_number_of_dimensions(job):
    @tf.function(input_signature=[tf.TensorSpec(None)])
    def gather(x):
        return hvd.allgather(hvd._allreduce(x))

    assert gather(tf.ones((2, 3))).shape == (2 * job.size(), 3)
    assert gather(tf.ones(1)).shape == (job.size(),)


def check_factors_are_exact(job):
    third = 1 / 3
    assert hvd._allreduce(tf.constant(3.0, tf.float64), op=hvd.Max, prescale_factor=third).numpy() == 3.0 * third


def check_the_input_stays_as_it_was(job):
    variable, tensor = tf.Variable([1.0, 2.0]), tf.constant([3.0])

    @tf.function
    def step(x):
        a, b = hvd._allreduce(variable), hvd._allreduce(x)
        return a, b, variable.read_value(), x * 1

    for _ in range(3):
        _, _, first, second = step(tensor)
        assert first.numpy().tolist() == [1, 2] and second.numpy() == 3 and tensor.numpy() == 3


def check_a_failed_kernel_harms_nobody(job):
    @tf.function
    def step(x):
        return [hvd._allreduce(x, name="fails"), *(hvd._allreduce(x[:1] * i) for i in range(8))]

    if job.size() > 1:
        for _ in range(3):
            with pytest.raises(tf.errors.FailedPreconditionError, match="HorovodAllreduce.*disagree on shape"):
                step(tf.ones(1 + job.rank()))
    hvd.barrier()
    assert step(tf.ones(2))[0].numpy().tolist() == [job.size()] * 2


def check_dtypes_that_cannot_be_sent(job):
    for dtype in (tf.complex64, tf.string):
        x = tf.cast([1], dtype) if dtype != tf.string else tf.constant(["x"])
        for call in (hvd._allreduce, hvd.allgather, lambda x: hvd._grouped_allreduce([tf.ones(1), x])):
            for run in (call, tf.function(call)):
                with pytest.raises((TypeError, tf.errors.InvalidArgumentError), match="(?i)allowed|valid|list of"):
                    run(x)
    hvd.barrier()


def check_xla_is_told_why_not(job):
    @tf.function(jit_compile=True)
    def compiled(x):
        return hvd._allreduce(x)

    with pytest.raises(tf.errors.UnimplementedError, match="(?s)XLA cannot compile.*jit_compile"):
        compiled(tf.ones(1))

    @tf.function(jit_compile=True)
    def inside(x):
        return tf.tanh(x) * 2

    @tf.function
    def outside(x):
        return hvd._allreduce(inside(x))

    assert outside(tf.zeros(1)).numpy() == 0


def check_numbers_of_a_running_graph(job):
    @tf.function
    def numbers():
        return (hvd.rank_op(), hvd.size_op(), hvd.local_rank_op(), hvd.local_size_op(), hvd.process_set_included_op(),
                hvd.process_set_included_op(77))

    expected = [job.rank(), job.size(), job.local_rank(), job.local_size(), 1]
    *values, unknown = (int(x) for x in numbers())
    assert values == expected and unknown < 0
    with pytest.raises(tf.errors.InvalidArgumentError, match="no such process set"):
        hvd.size_op(77)


def test_numbers_without_init_say_so():
    for number in (hvd.rank_op, hvd.size_op):
        with pytest.raises(tf.errors.FailedPreconditionError, match="not initialised"):
            number()


def check_join(job):
    @tf.function
    def step(x):
        return hvd._allreduce(x)

    for _ in range(job.rank()):
        step(tf.ones(1))
    assert int(hvd.join()) == job.size() - 1


def check_steps_leave_no_memory_behind(job):
    if job.size() != 2:
        return  # it takes a while
    variable = tf.Variable(tf.ones(1000))

    @tf.function
    def step():
        gathered = hvd.allgather(variable[:job.rank() + 1])
        variable.assign(hvd._allreduce(variable, op=hvd.Average) + 0 * tf.reduce_sum(gathered))

    def eagerly():
        hvd._grouped_allreduce([variable, hvd.broadcast(variable, 1, name="named")])
        hvd.alltoall(variable, [300, 700])

    process = psutil.Process()
    for run, steps in ((step, STEPS), (eagerly, STEPS // 2)):
        for _ in range(steps // 5):
            run()
        before = process.memory_info().rss
        for _ in range(steps):
            run()
        assert process.memory_info().rss - before < GROWTH


KILLED = """
import os, signal, sys, time
import tensorflow as tf
import lightcc.tensorflow.mpi_ops as hvd
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher ends the ranks that are left, which want to tell first
hvd.init()

@tf.function
def step(x):
    return hvd._allreduce(x, name="last")

step(tf.ones(3))
open(os.path.join(sys.argv[1], str(hvd.rank())), "w").close()
if hvd.rank() == 1:
    while len(os.listdir(sys.argv[1])) < 3:  # the others are behind the first step
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
begin = time.monotonic()
try:
    step(tf.ones(3))
except tf.errors.UnknownError as error:
    text = str(error)
    for word in ("HorovodAllreduce on rank", "tensor 'last'", "rank 1", "on host", "died"):
        assert word in text, (word, text)
    try:
        hvd._allreduce(tf.ones(3))
    except hvd.HorovodInternalError as error:
        assert isinstance(error, tf.errors.UnknownError) and "rank 1" in str(error)
        print(f"ended after {time.monotonic() - begin:.1f} s", flush=True)
"""


def test_a_rank_killed_in_a_graph_step_ends_that_of_the_others(tmp_path):
    code, output = ranks.launch(3, ["-c", KILLED, str(tmp_path)], ranks.DEADLINE_S)
    assert code != 0, "the launcher tells of the killed rank"
    times = [float(seconds) for seconds in re.findall(r"ended after ([\d.]+) s", output)]
    assert len(times) == 2 and max(times) < 5, output
