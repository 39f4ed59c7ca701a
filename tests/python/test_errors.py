"""What goes wrong on one rank: calls that cannot be, a job that is not there, ranks that leave. After an error that is
not the end of the job the next operation must work, with the right values."""
import contextlib
import os
import re
import time
import warnings

import numpy as np
import pytest

import ranks

pytestmark = [pytest.mark.tensorflow, pytest.mark.torch_sizes]


@pytest.mark.parametrize("np", (2, 3, 4))
def test_on_fresh_ranks(np):
    ranks.run_checks(__file__, np)


@pytest.mark.parametrize("np", (2, 3))
def test_a_rank_that_leaves_early(np):
    output = ranks.run_script("""
import sys, numpy, lightcc.numpy as hvd
hvd.init()
for _ in range(3):
    hvd.allreduce(numpy.ones(3))
if hvd.rank() == 1:
    sys.exit(0)
for name in ("first", "second"):
    try:
        hvd.allreduce(numpy.ones(3), name=name)
    except hvd.HorovodInternalError as error:
        print(f"told: {error}", flush=True)
""", np, deadline_s=200)
    told = re.findall("told: (.*)", output)
    assert len(told) == 2 * (np - 1)
    for text, name in zip(sorted(told), ["first"] * (np - 1) + ["second"] * (np - 1)):
        assert re.search(f"'{name}'.*rank 1 .*has left", text)


def test_who_is_hit_learns_of_the_first_cause():
    """One rank raises, before the first step or with gradients in flight; one rank ends of that. All others hear what
    was raised, whichever of the two they hear first, and where the error comes from memory for gradients, too."""
    pytest.importorskip("torch")
    code, output = ranks.launch(3, ["-c", """
import signal, torch, lightcc.torch as hvd
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher ends the ranks that are left, which want to tell first

def new_optimizer():
    return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.named_parameters())

def train(steps):
    optimizer, step = new_optimizer(), 0
    while True:
        optimizer.zero_grad()
        if step or steps or hvd.rank() != 1:
            model(torch.ones(2, 4)).sum().backward()
        if hvd.rank() == 1 and step == steps:
            raise ValueError("a bad\\nbatch " + 1000 * "!")
        optimizer.step()
        step += 1

for steps in (0, 2, 1):
    hvd.init()
    model = torch.nn.Linear(4, 2)
    try:
        train(steps)
    except ValueError:
        if steps == 1:
            raise  # it ends of it
        hvd.shutdown()
    except hvd.HorovodInternalError as error:
        print(f"told: {error}", flush=True)
        try:
            new_optimizer().step()
        except hvd.HorovodInternalError as error:
            print(f"told: {error}", flush=True)
        hvd.shutdown()
"""], deadline_s=ranks.DEADLINE_S)
    assert code == 1, output
    told = re.findall("told: (.*)", output)
    assert len(told) == 3 * 4, output
    cause = r"rank 1 \(pid \d+\) on host \S+ has left \(it (ended with|shut down while handling) ValueError: a bad bat"
    for text in told:
        assert re.search(cause, text), text
        assert "ended epoch" not in text and "could not agree" not in text and len(text) < 700, text
    assert sum("(it ended with ValueError" in text for text in told) == 4


def test_an_error_of_leaving_says_how_it_came_to_it():
    """Of a program that ends by itself, one that shuts down, and one that does so while it handles an exception."""
    output = ranks.run_script("""
import numpy, sys, lightcc.numpy as hvd
for how in ("shutdown", "finally", "end"):
    hvd.init()
    if hvd.rank() == 1 and how == "shutdown":
        hvd.shutdown()
    elif hvd.rank() == 1 and how == "finally":
        try:
            raise LookupError("its own")
        except LookupError:
            hvd.shutdown()
    elif hvd.rank() == 1:
        sys.exit()
    else:
        try:
            hvd.allreduce(numpy.ones(3), name=how)
        except hvd.HorovodInternalError as error:
            print(f"told: {error}", flush=True)
        hvd.shutdown()
""", 2, deadline_s=200)
    told = [text.split(" has left ")[1] for text in re.findall("told: (.*)", output)]
    assert told == ["(it shut down)", "(it shut down while handling LookupError: its own)", "(its program has ended)"]


# Before init; this check must be the first

NOT_INITIALISED = (r"Horovod has not been initialized; use hvd\.init\(\)\. "
                   r"lightcc is not initialised: call lightcc\.[a-z.]+\.init\(\) first")


def check_before_init():
    import lightcc.numpy as hvd
    assert not hvd.is_initialized()
    expect_no_job(hvd, np.ones(2), hvd.HorovodInternalError)


def expect_no_job(hvd, x, refused):
    for query in (hvd.rank, hvd.size, hvd.local_rank, hvd.local_size, hvd.cross_rank, hvd.cross_size,
                  hvd.is_homogeneous, hvd.global_process_set.size, lambda: hvd.add_process_set([0])):
        with pytest.raises(ValueError, match=NOT_INITIALISED):
            query()
    for verb in (hvd.allreduce, getattr(hvd, "allreduce_async_", hvd.allreduce), hvd.allgather,
                 lambda x: hvd.broadcast(x, 0), hvd.alltoall, hvd.reducescatter, lambda x: hvd.grouped_allreduce([x]),
                 lambda x: hvd.barrier()):
        with pytest.raises(refused, match=NOT_INITIALISED):
            verb(x)


def expect_works(name=None):
    import lightcc.numpy as hvd
    x = np.arange(3.0) + hvd.rank()
    total = sum(np.arange(3.0) + rank for rank in range(hvd.size()))
    assert (hvd.allreduce(x, op=hvd.Sum, name=name) == total).all()


# Calls that cannot be

def read_only(x):
    x = np.array(x)
    x.flags.writeable = False
    return x


BAD_CALLS = {  # what is wrong: call(hvd, x, scalar), and what the error says
    "root too large": (lambda hvd, x, _: hvd.broadcast(x, hvd.size()), r"root"),
    "root negative": (lambda hvd, x, _: hvd.broadcast(x, -1), r"root"),
    "splits too few": (lambda hvd, x, _: hvd.alltoall(x, [1] * (hvd.size() - 1)), r"splits"),
    "splits too large": (lambda hvd, x, _: hvd.alltoall(x, [x.shape[0]] * hvd.size()), r"splits"),
    "splits negative": (lambda hvd, x, _: hvd.alltoall(x, [-1] + [1] * (hvd.size() - 1)), r"split"),
    "splits too many": (lambda hvd, x, _: hvd.alltoall(x, [1] * (hvd.size() + 1)), r"splits"),
    "unequal parts": (lambda hvd, x, _: hvd.alltoall(x[:1]), r"splits"),
    "op and average": (lambda hvd, x, _: hvd.allreduce(x, average=True, op=hvd.Sum), r"average"),
    "op and average in a group": (
        lambda hvd, x, _: hvd.grouped_allreduce([x], average=False, op=hvd.Sum), r"average"),
    "unknown op": (lambda hvd, x, _: hvd.allreduce(x, op=17), r"op"),
    "reducescatter of a scalar": (lambda hvd, _, scalar: hvd.reducescatter(scalar), r"dimension|rank 1"),
    "alltoall of a scalar": (lambda hvd, _, scalar: hvd.alltoall(scalar), r"dimension|rank 1"),
    "set not registered": (lambda hvd, x, _: hvd.allreduce(x, process_set=hvd.ProcessSet([0])), r"registered"),
    "root beyond an int32": (lambda hvd, x, _: hvd.broadcast(x, 2 ** 32), r"root"),
    "set beyond an int32": (lambda hvd, x, _: hvd.allreduce(x, process_set=set_of_id(hvd, 2 ** 32)), r"process_set_id",
                            ValueError),
    "NUL in a name": (lambda hvd, x, _: hvd.allreduce(x, name="a\0b"), r"NUL", ValueError),
    "name of another type": (lambda hvd, x, _: hvd.allgather(x, name=5), r"name=5", TypeError),
    "bytes as a name": (lambda hvd, x, _: hvd.allgather(x, name=b"x"), r"name=b'x'", TypeError),
    "rank beyond an int32": (lambda hvd, x, _: hvd.add_process_set([0, 2 ** 32]), r"rank", ValueError),
    "negative rank": (lambda hvd, x, _: hvd.add_process_set([0, -1]), r"rank", ValueError),
    "bool as a rank": (lambda hvd, x, _: hvd.ProcessSet([True]), r"distinct ints", ValueError),
    "float as a rank": (lambda hvd, x, _: hvd.ProcessSet([1.0]), r"distinct ints", ValueError),
    "world beyond an int32": (lambda hvd, x, _: hvd.init(comm=[2 ** 32]), r"initialised already", ValueError),
}
BAD_CALLS_IN_PLACE = {  # likewise where there are handles and operations in place; the type unless it is a ValueError
    "root negative": (lambda hvd, x, _: hvd.broadcast_(x, -1), r"root"),
    "splits empty": (lambda hvd, x, _: hvd.alltoall(x, []), r"splits"),
    "splits beyond an int32": (lambda hvd, x, _: hvd.alltoall(x, [2 ** 40] * hvd.size()), r"splits"),
    "splits no ints": (lambda hvd, x, _: hvd.alltoall(x, [0.5] * hvd.size()), r"splits must be a list of ints"),
    "splits no list": (lambda hvd, x, _: hvd.alltoall(x, 1), r"splits must be a list of ints"),
    "op and average": (lambda hvd, x, _: hvd.grouped_allreduce_([x], average=False, op=hvd.Sum), r"average"),
    "op of another type": (lambda hvd, x, _: hvd.allreduce(x, op="sum"), r"op='sum': give hvd.Average", TypeError),
    "op of another type in a group": (lambda hvd, x, _: hvd.grouped_allreduce([x], op=1.0), r"op=1.0", TypeError),
    "root of another type": (lambda hvd, x, _: hvd.broadcast(x, 0.5), r"float", TypeError),
    "no root": (lambda hvd, x, _: hvd.broadcast_async_(x, None), r"NoneType", TypeError),
    "empty group": (lambda hvd, x, _: hvd.grouped_allreduce([]), r"at least one"),
    "a generator for a group": (lambda hvd, x, _: hvd.grouped_allgather(iter([x])), r"give list", TypeError),
    "not contiguous": (lambda hvd, x, _: hvd.allreduce(x.reshape(4, 2).T), r"contiguous"),
    "not contiguous in a group": (lambda hvd, x, _: hvd.grouped_allreduce([x, x[::2]]), r"contiguous"),
    "unknown handle": (lambda hvd, x, _: hvd.poll(12345678), r"handle"),
    "no handle": (lambda hvd, x, _: hvd.poll(None), r"handle None"),
    "handle beyond an int64": (lambda hvd, x, _: hvd.poll(2 ** 64 + 1), r"handle"),
    "no process set": (lambda hvd, x, _: hvd.alltoall(x, process_set=0), r"process_set=0: give a Proc", TypeError),
    "no name of a group": (lambda hvd, x, _: hvd.grouped_allreduce([x], name=5), r"name=5", TypeError),
    "op beyond an int32": (lambda hvd, x, _: hvd.allreduce(x, op=2 ** 32), r"op=4294967296"),
    "op beyond an int32 in a group": (lambda hvd, x, _: hvd.grouped_allreduce([x], op=2 ** 32), r"op=4294967296"),
    "factor beyond a float": (lambda hvd, x, _: hvd.allreduce(x, prescale_factor=10 ** 400), r"factor"),
    "factor beyond a float in a group": (
        lambda hvd, x, _: hvd.grouped_allreduce([x], postscale_factor=10 ** 400), r"factor"),
    **{f"{verb} of no elements, many": (
        lambda hvd, x, _, verb=verb: getattr(hvd, verb)(x[:0].reshape((0, 2 ** 30, 2 ** 30))), r"\[0, 1073741824,")
       for verb in ("allreduce", "allreduce_async_", "allgather", "alltoall", "reducescatter")},
    "rows without elements": (
        lambda hvd, x, _: hvd.allgather(x[:0].reshape((2 ** 47, 0))), r"\[140737488355328, 0\]"),
}


def set_of_id(hvd, number):
    process_set = hvd.ProcessSet([0])
    process_set.process_set_id = number
    return process_set


@pytest.mark.parametrize("what", BAD_CALLS)
def check_bad_call(framework, what):
    expect_own_error(framework, *BAD_CALLS[what])


@pytest.mark.parametrize("what", BAD_CALLS_IN_PLACE)
def check_bad_call_in_place(handled, what):
    expect_own_error(handled, *BAD_CALLS_IN_PLACE[what])


def expect_own_error(framework, call, text, kind=None):
    """It is this rank's error alone: whether one rank or all make it, the others never hear of it."""
    hvd = framework.hvd
    for who in ([0], [hvd.size() - 1], range(hvd.size())):
        if hvd.rank() in who:
            with pytest.raises(kind or framework.invalid, match=text):
                call(hvd, framework.tensor(np.ones(8), "float32"), framework.tensor(1, "float32"))
        for _ in range(2):
            x = framework.tensor([1.0 + hvd.rank()], "float32")  # the next unnamed operations still meet
            framework.expect(hvd.allreduce(x, op=hvd.Max), [hvd.size()], "float32")
            framework.expect(hvd.grouped_allreduce([x], op=hvd.Min)[0], [1], "float32")
            framework.expect(hvd.broadcast(x, 0), [1], "float32")
            framework.expect(hvd.allgather(x), np.arange(hvd.size()) + 1, "float32")
            hvd.alltoall(framework.tensor(np.ones(hvd.size()), "float32"))
            framework.expect(hvd.reducescatter(framework.tensor(np.ones(hvd.size()), "float32")), [1], "float32")


def check_dtypes_that_are_not_supported(handled):
    hvd = handled.hvd
    x = handled.tensor([1.0, 2.0], "complex64")
    for verb in (hvd.allreduce, hvd.allgather, lambda x: hvd.grouped_allreduce([x]), hvd.reducescatter_async):
        with pytest.raises(ValueError, match="complex64.*not supported.*bfloat16"):
            verb(x)
    for verb in (hvd.allreduce_async, hvd.allreduce, hvd.allgather, hvd.alltoall, hvd.reducescatter,
                 lambda x: hvd.broadcast(x, 0), lambda x: hvd.grouped_allreduce([x])):
        with pytest.raises(TypeError, match="A list cannot be sent"):
            verb([1.0, 2.0])
    expect_works()


def check_splits_of_wrong_form(handled):
    hvd = handled.hvd
    x = handled.tensor(np.ones(hvd.size()), "float32")
    for splits, text in ((handled.tensor(np.ones(hvd.size()), "int64"), "int32.*int64"),
                         (handled.tensor(np.ones((hvd.size(), 1)), "int32"), "one-dimensional.*2")):
        with pytest.raises(ValueError, match=text):
            hvd.alltoall(x, splits)
    expect_works()


def check_allgather_of_a_scalar(framework):
    hvd = framework.hvd
    with pytest.raises(framework.unsupported, match="dimension|rank 1"):
        hvd.allgather(framework.tensor(1.0, "float32"))
    expect_works()


def check_reducescatter_with_adasum(framework):
    hvd = framework.hvd
    x = framework.tensor(np.ones(hvd.size()), "float32")
    for run in framework.forms("reducescatter"):
        with pytest.raises(framework.unsupported, match="reducescatter has no adasum|Adasum combines whole tensors"):
            run([x], op=hvd.Adasum)
    framework.expect(hvd.reducescatter(x, op=hvd.Sum), [hvd.size()], "float32")


def check_read_only_array(job):
    import lightcc.numpy as hvd
    for verb in (hvd.allreduce_, hvd.allreduce_async_, lambda x: hvd.broadcast_(x, 0)):
        with pytest.raises(ValueError, match="read-only"):
            verb(read_only([1.0]))
    assert hvd.allreduce(read_only([1.0])) == 1  # reading it is fine


def check_process_sets(framework):
    hvd = framework.hvd
    x = framework.tensor([1.0], "float32")
    first = hvd.add_process_set([0])
    if hvd.rank() == 0:
        framework.expect(hvd.allreduce(x, process_set=first), [1], "float32")
        with pytest.raises(framework.invalid, match="root rank 1 is not in process set"):
            hvd.broadcast(x, 1, process_set=first)
    else:
        for verb in (hvd.allreduce, hvd.allgather, hvd.reducescatter, lambda x, process_set: hvd.barrier(process_set)):
            with pytest.raises(framework.invalid, match=r"not in process set \d+ \(ranks 0\)"):
                verb(x, process_set=first)
    old, gone = hvd.ProcessSet([0]), first.process_set_id
    hvd.remove_process_set(first)
    assert hvd.remove_process_set(old) is False and old.size() is None
    old.process_set_id = gone
    with pytest.raises(framework.invalid, match="does not exist|is not registered, or not any more"):
        hvd.allreduce(x, process_set=old)  # in TensorFlow perhaps by a graph that was built when it was there
    old.process_set_id = 77  # there never was one: a ValueError at the call, in TensorFlow too
    for verb in (hvd.allreduce, hvd.allgather, hvd.alltoall, hvd.reducescatter,
                 lambda x, process_set: hvd.broadcast(x, 0, process_set=process_set),
                 lambda x, process_set: hvd.grouped_allreduce([x], process_set=process_set),
                 lambda x, process_set: hvd.barrier(process_set)):
        with pytest.raises(ValueError, match="does not exist|is not registered, or not any more"):
            verb(x, process_set=old)
    for old.process_set_id in (77, -1, 2 ** 32, "first"):
        for query in (old.size, old.rank):
            with pytest.raises(ValueError, match="is not registered, or not any more"):
                query()
        assert hvd.remove_process_set(old) is False
    expect_works()


def check_name_in_flight(handled):
    hvd = handled.hvd
    x = handled.tensor([1.0], "float32")
    for late in (0, hvd.size() - 1):  # without it the others' operation stays in flight
        handles = []
        if hvd.rank() != late:
            handles.append(hvd.allreduce_async(x, name="twice", op=hvd.Sum))
            for verb in (hvd.allreduce, hvd.allreduce_async_, lambda x, name: hvd.grouped_allreduce([x], name=name)):
                with pytest.raises(ValueError, match="'twice'.*still in flight on rank"):
                    verb(handled.tensor([1.0], "float32"), name="twice")
        hvd.barrier()
        if hvd.rank() == late:
            handles.append(hvd.allreduce_async(x, name="twice", op=hvd.Sum))
        handled.expect(hvd.synchronize(handles[0]), [hvd.size()], "float32")
        handled.expect(hvd.allreduce(x, name="twice", op=hvd.Sum), [hvd.size()], "float32")


# The job's life

def check_two_inits(job):
    expect_works("before")
    job.init()
    job.init()
    expect_works("after")


def check_fork(handled):
    hvd = handled.hvd
    x = handled.tensor([1.0], "float32")
    handled.expect(hvd.allreduce(x, op=hvd.Sum), [hvd.size()], "float32")

    def topology():
        return [getattr(hvd, name)() for name in ("is_initialized", "rank", "size", "local_rank", "local_size",
                                                  "cross_rank", "cross_size")]
    here = topology()
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: this process has threads
        child = os.fork()
    if child == 0:
        texts = []
        for verb in (hvd.allreduce, hvd.allreduce_async, hvd.allgather, lambda x: hvd.broadcast(x, 0),
                     lambda x: hvd.barrier()):
            try:
                verb(x)
                texts.append("no error")
            except hvd.HorovodInternalError as error:
                texts.append(str(error))
            except BaseException as error:
                texts.append(repr(error))
        texts.append("the same place" if topology() == here else f"{topology()}, not {here}")
        os.write(writer, "\n".join(texts).encode())
        os._exit(0)
    os.close(writer)
    for _ in range(10):  # the parent goes on
        handled.expect(hvd.allreduce(x, op=hvd.Sum), [hvd.size()], "float32")
    with os.fdopen(reader) as pipe:
        texts = pipe.read().splitlines()
    assert os.waitpid(child, 0) == (child, 0)
    assert len(texts) == 6 and texts.pop() == "the same place"
    for text in texts:
        assert "forked" in text and "init()" in text, text
    expect_works()


def check_shutdown_and_init(framework):
    hvd = framework.hvd
    for _ in range(3):
        expect_works("same")
        hvd.shutdown()
        hvd.shutdown()
        assert not hvd.is_initialized()
        expect_no_job(hvd, framework.tensor([1.0, 1.0], "float32"), framework.refused)
        hvd.init()
    expect_works("same")


def check_shutdown_with_operations_in_flight(handled):
    hvd = handled.hvd
    handles = []
    if hvd.rank() > 0:
        with contextlib.suppress(hvd.HorovodInternalError):  # another rank has left with its work in flight
            for _ in range(5):
                handles.append(hvd.allreduce_async(handled.tensor(np.ones(5), "float32")))
    hvd.shutdown()
    assert [hvd.synchronize(handle) for handle in handles] == [None] * len(handles)
    hvd.init()
    expect_works()


def check_one_rank_shuts_down(framework):
    hvd = framework.hvd
    for leaver in (0, hvd.size() - 1):
        expect_works()
        if hvd.rank() == leaver:
            hvd.shutdown()
        else:
            x = framework.tensor([1.0], "float32")
            for run in (*framework.forms("allreduce"), *framework.forms("allgather")):
                begin = time.monotonic()
                with pytest.raises(framework.lost, match=r"rank \d .*has left"):
                    run([x])
                assert time.monotonic() < begin + 5
            hvd.shutdown()
        hvd.init()
    expect_works()
