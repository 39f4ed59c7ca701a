"""Which arrays of GPUs are taken, which are refused and why; and how their place is written into requests."""
# ruff: noqa: F811  fixtures are imported and then named by arguments
import ctypes
import importlib.util
import types

import gpu_double
import numpy as np
import pytest
from gpu_fixtures import boolean, case, device, double, framework, handled, job, no_faults, number  # noqa: F401
from test_errors import expect_works
from test_request_buffer import TENSOR, mirror_of, seen_by_c

import ranks
from lightcc.core import lib, request_buffer
from lightcc.core.adapter import adapter_of, cuda_place


@pytest.mark.parametrize("np", {2}.intersection(ranks.SIZES))
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


# Requests

PLACE = lib.Place(3, lib.CUDA, 5 << 40, lambda: PLACE)


def expect_place(tensor, device, kind, stream):
    place = tensor["place"]
    assert (place.device, place.kind, place.stream) == (device, kind, stream)


def test_places_are_where_c_reads_them():
    assert ctypes.sizeof(lib._Place) == ctypes.sizeof(mirror_of("lightcc_place"))
    for place, expected in ((PLACE, (3, 1, 5 << 40)), (None, (0, 0, None))):  # in the same buffer
        def check(address):
            expect_place(seen_by_c(address)[1][0], *expected)
            return 7
        assert request_buffer.call(check, 1, 0, 0, 0, 0, ndim=2, dtype=1, place=place) == 7
    buffer = request_buffer.RequestBuffer(3)
    for index, place in enumerate((None, PLACE, None)):
        buffer.set_tensor(index, 1, 2, 3, 4, 5, place)
    buffer.set_request(0, 0, 0, 0)
    for index, tensor in enumerate(seen_by_c(buffer.address)[1]):
        expect_place(tensor, *(PLACE[:3] if index == 1 else (0, 0, None)))
        assert (tensor["input"], tensor["ndim"]) == (1, 5) and TENSOR.place.offset == 32


@pytest.mark.parametrize("stream, expected", [(0, 0), (1, 0), (5 << 40, 5 << 40)])
def test_streams(stream, expected):
    assert cuda_place(2, stream, lambda: None)[:3] == (2, lib.CUDA, expected)


def test_the_default_stream_of_a_thread_is_refused():
    with pytest.raises(ValueError, match="per-thread default stream"):
        cuda_place(0, 2, lambda: None)


# Which kinds of arrays

def check_places(framework, double, device):
    x, stream = framework.tensor(np.ones((2, 3)), "float32"), double.new_stream(device)
    address, dtype, shape, place = adapter_of(x).describe(x)
    assert (dtype, tuple(shape), place[:3]) == (lib.FLOAT32, (2, 3), (device, lib.CUDA, 0)) and address
    with double.on(device, stream):
        assert place.now()[:3] == adapter_of(x).describe(x)[3][:3] == (device, lib.CUDA, stream)
    host = framework.on_host(np.ones((2, 3)), "float32")
    assert adapter_of(host).describe(host)[3] is None


def check_outputs_are_of_the_kind_of_inputs(framework, device):
    hvd = framework.hvd
    x = framework.tensor(np.ones((hvd.size(), 2)), "float32")
    for y in (hvd.allreduce(x), hvd.broadcast(x, 0), hvd.allgather(x), hvd.alltoall(x), hvd.reducescatter(x),
              hvd.grouped_allreduce([x])[0]):
        assert type(y) is type(x) and adapter_of(y).describe(y)[3][:2] == (device, lib.CUDA)


def check_an_array_whose_library_makes_none(job, double, device):
    x = gpu_double.PlainArray.of(double, device, np.full(job.size(), 1.0 + job.rank()))
    for verb in (lambda x: job.allreduce(x), lambda x: job.broadcast(x, 0), lambda x: job.grouped_allreduce([x])):
        with pytest.raises(ValueError, match="new PlainArray for the output: use an operation in place"):
            verb(x)
    with pytest.raises(ValueError, match="new PlainArray for the output"):
        job.allgather(x)  # after the exchange: the others have what they asked for
    assert (job.allreduce_(x, op=job.Max).get() == job.size()).all()
    assert (job.synchronize(job.broadcast_async_(x, 0)).get() == job.size()).all()
    expect_works()


def check_an_array_of_a_library_whose_arrays_are_immutable(job, double, device):
    """The text says what is missing, before anything is sent, and not that something is in place."""
    x = gpu_double.ImmutableArray.of(double, device, np.ones(2 * job.size()))
    verbs = (job.allreduce, job.allreduce_, job.allgather, job.alltoall, job.reducescatter, job.allreduce_async,
             lambda x: job.broadcast(x, 0), lambda x: job.broadcast_(x, 0), lambda x: job.grouped_allreduce([x]),
             lambda x: job.grouped_allgather([x]))
    for verb in verbs:
        with pytest.raises(ValueError, match=r"^\w+ of (a tensor|tensor 0 of a group): A ImmutableArray of "
                           r"gpu_double is immutable.*torch\.from_dlpack"):
            verb(x)
        expect_works()


def check_what_is_refused(job, double, device):
    new = gpu_double.StandardArray
    read_only = new.of(double, device, np.ones(3))
    read_only.form.flags.writeable = False
    swapped = new.of(double, device, np.ones(3, ">f4"))
    for call, text in ((lambda: job.allreduce_(read_only), "read-only"),
                       (lambda: job.allreduce(swapped), "not supported"),
                       (lambda: job.allreduce(new.of(double, device, np.ones(3, "complex64"))), "complex64.*supported"),
                       (lambda: job.allreduce(new.of(double, device, np.ones((3, 2))).T), "contiguous"),
                       (lambda: job.allreduce(new.of(double, device, np.ones(6))[::2]), "contiguous")):
        with pytest.raises(ValueError, match=text):
            call()
    assert (job.allreduce(read_only, op=job.Sum).get() == job.size()).all()  # reading it is fine
    one_row = new.of(double, device, np.ones((4, 3)))[::4]  # its strides are not those of a new array
    assert one_row.form.strides != np.ones((1, 3)).strides
    assert (job.allreduce(one_row, op=job.Sum).get() == job.size()).all()


def check_an_array_elsewhere(job):
    """One that could be on a GPU, and is on another device."""
    class Elsewhere:
        def __dlpack_device__(self):
            return 1, 0
    with pytest.raises(TypeError, match="An? Elsewhere cannot be sent: .*cupy.ndarray"):
        job.allreduce(Elsewhere())


def check_a_device_that_is_not_there(job, double, device, no_faults):
    no_faults.add(f"there is no device {gpu_double.DEVICES}")  # only CUDA knows
    class Array(gpu_double.StandardArray):
        def __dlpack_device__(self):
            return 2, gpu_double.DEVICES
    for run in (job.allreduce_, lambda x: job.allreduce_(x, name="x"), lambda x: job.grouped_allreduce_([x]),
                lambda x: job.synchronize(job.allreduce_async_(x))):
        with pytest.raises(ValueError, match=f"device {gpu_double.DEVICES}|GPU {gpu_double.DEVICES}"):
            run(Array.of(double, device, np.ones(3)))
    expect_works()
    expect_works("x")


def check_streams_of_a_gpu_are_of_that_gpu(job, double, device):
    """Another device's current stream is none of a tensor's."""
    x = gpu_double.StandardArray.of(double, device, np.ones(1000))
    with double.on(device + 1, double.new_stream(device + 1)):
        assert (job.allreduce(x, op=job.Sum).get() == job.size()).all()


def check_other_devices_of_torch(job):
    if importlib.util.find_spec("torch") is None:
        pytest.skip("there is no torch")
    import torch

    import lightcc.torch as hvd
    with pytest.raises(ValueError, match="on meta; this version of lightcc works on CPU and CUDA tensors"):
        hvd.allreduce(torch.ones(3, device="meta"))


def check_splits_of_several_kinds(framework):
    hvd, size = framework.hvd, framework.hvd.size()
    x = framework.tensor(np.arange(2.0 * size), "float32")
    for splits in ([2] * size, np.full(size, 2, np.int32), framework.tensor(np.full(size, 2), "int32")):
        output, received = hvd.alltoall(x, splits)
        framework.expect(received, [2] * size, "int32")
        framework.expect(output, np.tile([2.0 * hvd.rank(), 2.0 * hvd.rank() + 1], size), "float32")


def check_objects_beside_them(framework):
    from lightcc.core.objects import allgather_object
    x = framework.tensor(np.ones(3), "float32")
    handle = framework.hvd.allreduce_async(x, op=framework.hvd.Sum)
    assert allgather_object({"rank": framework.hvd.rank()})[-1] == {"rank": framework.hvd.size() - 1}
    framework.expect(framework.hvd.synchronize(handle), [framework.hvd.size()] * 3, "float32")


# torch's own adapter, with a torch whose tensors are on GPUs

def test_torch_asks_for_the_stream_of_the_tensors_device():
    torch = pytest.importorskip("torch")
    from lightcc.core import adapter
    streams = {0: 0, 3: 7 << 40}
    ours = adapter._Torch(torch)
    ours.torch = types.SimpleNamespace(cuda=types.SimpleNamespace(
        current_stream=lambda device: types.SimpleNamespace(cuda_stream=streams[device.index])))
    for index, stream in streams.items():
        tensor = types.SimpleNamespace(is_cuda=True, device=torch.device("cuda", index))
        place = ours._place(tensor)
        assert place[:3] == place.now()[:3] == (index, lib.CUDA, stream)
    streams[3] = 8 << 40
    assert place.stream == 7 << 40 and place.now().stream == 8 << 40
