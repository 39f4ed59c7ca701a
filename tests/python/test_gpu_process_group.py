"""torch.distributed over lightcc and DistributedDataParallel's hook with tensors of GPUs, which are the double's
(gpu_double.py): what they give, and that every access is in order, on whichever stream somebody waits.

PyTorch's own functions are here those of the CPU, which know no stream: where lightcc copies by them (lists of outputs,
strides, compression), these checks wait for the GPU first and show values only. tests/gpu/check_process_group.py has
real streams there, futures with devices, functional collectives, DistributedDataParallel and FSDP2.
"""
# ruff: noqa: F811  fixtures are imported and then named by arguments
import contextlib
import functools
import time
from unittest import mock

import gpu_frameworks
import numpy as np
import pytest
from gpu_fixtures import KINDS, device, double, job, no_faults  # noqa: F401
from test_process_group import collectives
from test_termination import Ranks

import ranks
from jobs import DEADLINE_S
from lightcc.core.adapter import MixedDevicesError, adapter_of

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

from lightcc.torch import device_order  # noqa: E402

COUNT = 3000
pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"),
              pytest.mark.skipif("torch" not in KINDS, reason="torch is not among the frameworks")]


@pytest.mark.parametrize("np", {2}.intersection(ranks.SIZES))
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


class DoubleStreams(device_order.Streams):
    """The double's streams in place of CUDA's."""

    def __init__(self, double):
        self.double = double
        self.own_stream = functools.lru_cache(maxsize=None)(double.new_stream)

    def mark(self, device):
        return self.double.event(device)

    def follow(self, device, event):
        event.wait()

    def keep(self, device, tensors):
        for tensor in tensors:
            gpu_frameworks.keep_for(tensor, self.double.stream(device))

    def own(self, device):
        return self.double.on(device, self.own_stream(device))

    def of_future(self, device):
        return []  # this PyTorch has no GPU: who waits in C++ is no stream's, but the host


@pytest.fixture(scope="module")
def world(job, double):
    """The group, and the place of a GPU for what asks where a tensor is."""
    from lightcc.torch import slots
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_order, "streams", DoubleStreams(double))
        patch.setattr(slots, "device_of", lambda tensor: tensor.device if gpu_frameworks.memory_of(tensor) is None
                      else torch.device("cuda", gpu_frameworks.memory_of(tensor)))
        dist.init_process_group("lightcc")
        yield dist.group.WORLD
        dist.destroy_process_group()


@pytest.fixture
def gpu(double, device):
    return gpu_frameworks.TorchOnGpu(double, device)


@pytest.fixture
def host_waits(monkeypatch, double, device, gpu):
    """PyTorch's functions of the CPU find what the GPU has written, and make tensors there. Returns how a tensor is
    brought to the GPU."""
    from lightcc.torch import collectives as module

    def wait():
        double.read(device, 0, np.empty(0))

    def put(tensor):
        if tensor.is_sparse:
            return tensor  # has no memory of its own that could be the double's
        made = gpu.tensor(tensor.numpy(), str(tensor.dtype)[6:])
        wait()
        return made

    def synchronous(function):
        def call(*arguments):
            result = function(*arguments)
            wait()
            return result
        return call
    adapter = adapter_of(torch.empty(0))
    monkeypatch.setattr(adapter, "output", synchronous(adapter.output))
    monkeypatch.setattr(module, "_joined", lambda tensors: put(torch.cat([t.detach().reshape(-1) for t in tensors])))
    return put


def test_what_is_asked_of_cuda(monkeypatch):
    """PyTorch's own streams, by the signatures that they have."""
    stream, tensor = (mock.create_autospec(kind, instance=True) for kind in (torch.cuda.Stream, torch.Tensor))
    tensor.layout, sparse = torch.strided, torch.eye(2).to_sparse()
    monkeypatch.setattr(torch.cuda, "current_stream", mock.create_autospec(torch.cuda.current_stream,
                                                                           return_value=stream))
    streams = device_order.Streams()
    event = streams.mark(1)
    streams.follow(1, event)
    streams.keep(1, [tensor, sparse])
    assert event is stream.record_event.return_value
    stream.wait_event.assert_called_once_with(event)
    tensor.record_stream.assert_called_once_with(stream)
    assert {call.args for call in torch.cuda.current_stream.call_args_list} == {(1,)}
    assert streams.of_future(1) == [torch.device("cuda:1")]


def test_own_stream_leaves_other_gpus_alone(monkeypatch):
    """torch.cuda.stream goes back to the device that was current, and makes a context there."""
    current = []

    @contextlib.contextmanager
    def entered(what):
        current.append(what)
        yield
        assert current.pop() == what
    monkeypatch.setattr(device_order, "_own_stream", lambda device: (*current, f"own {device}"))
    monkeypatch.setattr(torch.cuda, "device", entered)
    monkeypatch.setattr(torch.cuda, "stream", entered)
    with device_order.Streams().own(1):
        assert current == [1, (1, "own 1")], "the device is current when the stream is made, entered and left"
    assert not current


def test_sparse_results_are_kept_for_who_waits(monkeypatch):
    """lightcc's own stream has made their memory, which PyTorch would give to it again while another stream reads."""
    asked = mock.create_autospec(device_order.Streams, instance=True)
    monkeypatch.setattr(device_order, "streams", asked)
    monkeypatch.setattr(device_order.request, "order", lambda handle: None)
    place, tensor = mock.Mock(device=1), torch.eye(2).to_sparse()
    place.now.return_value.stream = 7
    order = device_order.DeviceOrder(place, [tensor])
    place.now.return_value.stream = 8  # lightcc's own
    order.end(1, lambda _: tensor.copy_(torch.ones(2, 2).to_sparse()))
    asked.keep.reset_mock()
    order.follow()
    assert not asked.keep.called
    place.now.return_value.stream = 7
    order.follow()
    (device, kept), _ = asked.keep.call_args
    assert device == 1 and [t.data_ptr() for t in kept] == [t.data_ptr() for t in (tensor._indices(), tensor._values())]


def values_of(gpu, outputs):
    """Of the double's tensors; what has strides, or is sparse, was written by the host."""
    return [t.to_dense().tolist() if t.is_sparse or not t.is_contiguous() else gpu.values(t).tolist() for t in outputs]


def check_every_function(world, gpu, host_waits, job):
    for name in collectives(world, host_waits):
        for use in (dist.Work.wait, lambda work: work.get_future().wait()):
            start, outputs, expected = collectives(world, host_waits)[name]
            use(start())
            assert values_of(gpu, outputs) == expected, name


def operations(rank, size, tensor):
    """What runs on the GPU from the first byte to the last: a function that starts it, the tensors it writes, and what
    they are then. tensor: makes one that is full of a value, by the current stream."""
    total, numbers = sum(range(size)), np.repeat(np.arange(float(size)), COUNT)

    def rooted(kind):
        options = kind()
        options.rootRank = size - 1
        return options

    def made(start, written, *values):
        return lambda: start(dist.group.WORLD), written, values
    x, y, every = (tensor(rank, COUNT) for _ in range(3))
    large, whole, part = tensor(rank, COUNT * size), tensor(-1, COUNT * size), tensor(-1, COUNT)
    return {
        "allreduce": made(lambda group: group.allreduce([x]), [x], np.full(COUNT, total)),
        "allreduce_coalesced": made(lambda group: group.allreduce_coalesced([x, y]), [x, y], np.full(COUNT, total),
                                    np.full(COUNT, total)),
        "broadcast": made(lambda group: group.broadcast([x], rooted(dist.BroadcastOptions)), [x],
                          np.full(COUNT, size - 1)),
        "_allgather_base": made(lambda group: group._allgather_base(whole, every), [whole], numbers),
        "allgather_into_tensor_coalesced": made(
            lambda group: group.allgather_into_tensor_coalesced([whole], [every]), [whole], numbers),
        "_reduce_scatter_base": made(lambda group: group._reduce_scatter_base(part, large), [part],
                                     np.full(COUNT, total)),
        "reduce_scatter_tensor_coalesced": made(
            lambda group: group.reduce_scatter_tensor_coalesced([part], [large]), [part], np.full(COUNT, total)),
        "alltoall_base": made(lambda group: group.alltoall_base(whole, large, [], []), [whole], numbers),
    }


@pytest.fixture
def started(world, gpu, job):
    """Starts an operation by name, with new tensors of the current stream."""
    def start(name):
        begin, written, values = operations(job.rank(), job.size(), lambda value, count: gpu.tensor(
            np.full(count, float(value)), "float32"))[name]
        return begin(), written, values
    return start


OPERATIONS = list(operations(0, 1, lambda *_: None))


def expect(gpu, written, values):
    for tensor, expected in zip(written, values):
        assert (gpu.values(tensor) == expected).all()


@pytest.mark.parametrize("name", OPERATIONS)
def check_whoever_waits_goes_on_behind_it(started, gpu, double, device, name):
    """On any stream, also after others, and whether or not lightcc's own stream has finished it before."""
    for asks in (False, True):
        first, second, third = (double.new_stream(device) for _ in range(3))
        with double.on(device, first):
            work, written, values = started(name)
        if asks:
            deadline = time.monotonic() + DEADLINE_S
            while not work.is_completed():
                assert time.monotonic() < deadline
            assert work.is_success()
        for stream in (second, third, second):
            with double.on(device, stream):
                assert work.wait()
                expect(gpu, written, values)
        with double.on(device, first):
            work.wait()
            for tensor in written:
                double.write(device, tensor.data_ptr(), np.zeros(tensor.shape, "float32"))


@pytest.mark.parametrize("name", OPERATIONS)
def check_memory_is_used_again_in_order(started, gpu, double, device, name):
    """Of works that are waited for on another stream, and of those that nobody waits for."""
    first, second = double.new_stream(device), double.new_stream(device)
    for turn in range(12):
        with double.on(device, first):
            work, written, values = started(name)
        if turn % 3:
            with double.on(device, second):
                work.wait()
                expect(gpu, written, values)
        del work, written


@pytest.mark.parametrize("name", OPERATIONS)
def check_futures(started, gpu, double, device, name):
    """A callback runs behind the outputs, in lightcc's thread; and whoever waits for the future goes on behind them.
    One that is added when the future is done would run here at once, which PyTorch orders for GPUs that it knows."""
    def check(future):
        for tensor, expected in zip(future.value(), values):
            assert (gpu.values(tensor) == expected).all()
        return "done"
    for stream in (0, double.new_stream(device)):
        with double.on(device, stream):
            work, written, values = started(name)
            with work._operation._lock:  # so it is not done yet
                future = work.get_future()
                called = future.then(check)
            assert called.wait() == "done"
            assert future.wait() is not None and future.done()
            expect(gpu, written, values)


def check_order_that_is_taken_away_is_found(started, double, device, monkeypatch, no_faults, job):
    """So that these checks can fail: a wait that orders no stream. An access without order is described unless the host
    happens to know already that the copy is done, so some are needed, and the ranks end together, when all have it."""
    monkeypatch.setattr(device_order.streams, "follow", lambda device, event: None)
    deadline = time.monotonic() + DEADLINE_S
    first, second = double.new_stream(device), double.new_stream(device)
    while not all(job.allgather_object(not set(double.faults()) <= no_faults)):
        assert time.monotonic() < deadline
        with double.on(device, first):
            work, written, _ = started("allreduce")
            work.wait()
        with double.on(device, second):
            work.wait()
            double.write(device, written[0].data_ptr(), np.zeros(COUNT, "float32"))
    no_faults.update(double.faults())


def check_shutdown_with_works_that_nobody_waited_for(started, gpu, double, device, job):
    from lightcc.core import lib
    for _ in range(5):
        works = [started("allreduce") for _ in range(3)]
        deadline = time.monotonic() + DEADLINE_S
        while not all(lib.poll(work._operation._handle) for work, *_ in works):
            assert time.monotonic() < deadline
        job.barrier()
        job.shutdown()
        del works
        later = [gpu.tensor(np.ones(COUNT), "float32") for _ in range(6)]
        assert all((gpu.values(x) == 1).all() for x in later)
        job.init()


# DistributedDataParallel's hook

class Bucket:
    """What comm_hook asks of a dist.GradBucket."""

    def __init__(self, tensor, index):
        self.tensor, self.number = tensor, index

    def buffer(self):
        return self.tensor

    def index(self):
        return self.number


def in_backward(function):
    """Calls it in a backward pass, as DistributedDataParallel calls a hook."""
    called = []
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda grad: called.append(function()))
    x.backward()
    return called[0]


@pytest.mark.parametrize("how", ["in backward", "by Join"])
def check_the_hook(world, gpu, double, device, job, how):
    from lightcc.torch import ddp
    mean = (job.size() - 1) / 2
    options = {"plain": (None, mean), "sum": (ddp.Options(op=job.Sum), job.size() * mean),
               "factors": (ddp.Options(gradient_predivide_factor=2.0), mean)}
    call = in_backward if how == "in backward" else lambda function: function()
    for state, expected in options.values():
        for stream in (0, double.new_stream(device)):
            with double.on(device, stream):
                buffers = [gpu.tensor(np.full(COUNT, float(job.rank())), "float32") for _ in range(3)]
                futures = call(lambda buffers=buffers, state=state: [
                    ddp.comm_hook(state, Bucket(buffer, i)) for i, buffer in enumerate(buffers)])
                if how == "in backward":
                    assert all(future.done() for future in futures)
                for future, buffer in zip(futures, buffers):
                    assert future.wait() is buffer
                    expect(gpu, [buffer], [expected])
    assert not ddp._in_flight


def check_the_hook_with_compression(world, gpu, host_waits, job):
    from lightcc.torch import ddp

    class Half:
        """hvd.Compression.fp16 for this PyTorch."""

        @staticmethod
        def compress(tensor):
            return host_waits(tensor.half()), None

        @staticmethod
        def decompress(tensor, _):
            return torch.from_numpy(gpu.array(tensor)).float()
    buffer = host_waits(torch.full((COUNT,), 1 + job.rank() / 4096))
    ddp.comm_hook(ddp.Options(compression=Half, op=job.Sum), Bucket(buffer, 0)).wait()
    assert (gpu.values(buffer) == job.size()).all(), "the parts that float16 has not are lost"


# Errors

def check_tensors_on_several_devices(world, gpu, job):
    here, there = torch.ones(4), gpu.tensor(np.ones(4), "float32")
    for call in (lambda: dist.all_reduce_coalesced([here, there]), lambda: dist.all_to_all_single(here, there),
                 lambda: world._allgather_base(torch.ones(4 * job.size()), there),
                 lambda: world.allgather([[here] * job.size()], [there])):
        with pytest.raises(MixedDevicesError, match=rf"rank {job.rank()}: tensor 1 .*cuda:{job.rank()}"):
            call()
    dist.all_reduce(there)
    assert (gpu.values(there) == job.size()).all()


def check_results_that_do_not_fit(world, gpu, job):
    """6 bytes into 4, where 6 // 4 is the 1 element that there is: what lies behind it is left alone."""
    both, sent = gpu.tensor(np.ones(2), "float32"), gpu.tensor(np.zeros(3), "bool")
    with pytest.raises(ValueError, match="result should be 4 elements .* has 6"):
        dist.all_gather_into_tensor(both[:1], sent)
    assert (gpu.values(both) == 1).all()


def check_ranks_that_disagree(world, gpu, job):
    """The work, its future and the hook have the error, which names ranks and tensor; what comes next works."""
    from lightcc.torch import ddp
    there = gpu.tensor(np.ones(5), "float32")
    text = "disagree on device: rank 0 has cpu, rank 1 has cuda"
    for _ in range(2):
        mine = torch.ones(5) if job.rank() == 0 else there
        with pytest.raises(job.HorovodInternalError, match=text):
            dist.all_reduce(mine, async_op=True).wait()
        with pytest.raises(job.HorovodInternalError, match=text):
            dist.all_reduce(mine, async_op=True).get_future().wait()
        with pytest.raises(job.HorovodInternalError, match=rf"'ddp\.0'.*{text}"):
            ddp.comm_hook(None, Bucket(mine, 0)).wait()
        with pytest.raises(job.HorovodInternalError, match=rf"'ddp\.0'.*{text}"):
            in_backward(lambda mine=mine: ddp.comm_hook(None, Bucket(mine, 0)))
    dist.all_reduce(there)
    assert (gpu.values(there) == job.size()).all()


def check_own_stream_that_cannot_be(started, gpu, job, monkeypatch):
    """CUDA's error reaches who polls and who waits in C++, and what comes next works."""
    def fail(device):
        raise RuntimeError("CUDA error: out of memory")
    with monkeypatch.context() as patch:
        patch.setattr(device_order.streams, "own", fail)
        polled, waited = started("allreduce"), started("allreduce")
        _unordered.extend((polled, waited))
        deadline = time.monotonic() + DEADLINE_S
        while not polled[0].is_completed():
            assert time.monotonic() < deadline
        assert "out of memory" in str(polled[0].exception()) and not polled[0].is_success()
        with waited[0]._operation._lock:  # so it is not done yet
            called = waited[0].get_future().then(lambda future: future.value())
        with pytest.raises(RuntimeError, match="out of memory"):
            called.wait()
    work, written, values = started("allreduce")
    work.get_future().then(lambda future: future.value()).wait()
    work.wait()
    expect(gpu, written, values)


_unordered = []  # no stream goes on behind these, so their memory must not be used again


DYING = """
import os, sys, time
sys.path.insert(0, {folder!r})
import gpu_double, gpu_frameworks, numpy, torch, torch.distributed as dist
os.environ.update(LIGHTCC_CUDA_LIBRARY=gpu_double.PATH, LIGHTCC_NCCL="0")
double = gpu_double.Double()
with gpu_frameworks.as_torch_on_gpu(double):
    import lightcc.torch as hvd
    from lightcc.torch import device_order
    from test_gpu_process_group import DoubleStreams
    device_order.streams = DoubleStreams(double)
    hvd.init()
    dist.init_process_group("lightcc")
    gpu = gpu_frameworks.TorchOnGpu(double, hvd.rank())
    x = gpu.tensor(numpy.ones(100_000), "float32")
    dist.all_reduce(x)
    print("ready", flush=True)
    if hvd.rank() == 1:
        os._exit(3)
    try:
        while True:
            dist.all_reduce(x, async_op=True).wait()
    except hvd.HorovodInternalError as error:
        y = gpu.values(x)  # the stream is free
        print("told", error, double.faults(), flush=True)
    os._exit(0)
"""


def test_a_rank_that_dies():
    folder = __file__.rpartition("/")[0]
    with Ranks(2, DYING.format(folder=folder)) as job:
        job.wait_ready()
        told = job.output(0)
        assert "told" in told and "rank 1 " in told and "died" in told and told.rstrip().endswith("[]"), told
