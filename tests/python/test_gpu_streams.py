"""The order of streams around operations on tensors of GPUs, which are the double's (gpu_double.py): it describes every
access that could come too early, whether or not it did."""
# ruff: noqa: F811  fixtures are imported and then named by arguments
import contextlib
import os
import re

import gpu_double
import numpy as np
import pytest
from gpu_fixtures import boolean, case, device, double, framework, handled, job, no_faults, number  # noqa: F401
from test_adasum import SHAPES, adasum, expect_near, numbers

import ranks

MIB = 1 << 20
NAMES = [f"{verb}_async{end}" for verb, end in (("allreduce", ""), ("allreduce", "_"), ("broadcast", ""), (
    "broadcast", "_"), ("allgather", ""), ("alltoall", ""), ("reducescatter", ""), ("grouped_allreduce", ""), (
        "grouped_allreduce", "_"), ("grouped_allgather", ""), ("grouped_reducescatter", ""))]


@pytest.mark.parametrize("np", {2}.intersection(ranks.SIZES))
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


def test_an_order_that_is_missing_is_found():
    """So that these checks can fail: the core's copies without the events between streams."""
    folder = os.path.dirname(__file__)
    output = ranks.run_script(f"""
import os, sys
sys.path.insert(0, {folder!r})
import gpu_double, numpy
os.environ.update(LIGHTCC_CUDA_LIBRARY=gpu_double.PATH, LIGHTCC_NCCL="0")
import lightcc.numpy as hvd
double = gpu_double.Double()
hvd.init()
new = lambda: gpu_double.StandardArray.of(double, hvd.rank(), numpy.ones(100_000))
hvd.allreduce(new()).get()
assert double.faults() == []
double.ignore_order(True)
hvd.allreduce(new()).get()
print("faults:", double.faults())
""", 2)
    found = re.findall("faults: (.*)", output)
    assert len(found) == 2 and all("a copy on stream" in faults for faults in found), output


# Streams

def start(hvd, name, x):
    """Starts an operation on x, which is full of 1 + rank: its handle, and what it gives."""
    size, count = hvd.size(), x.shape[0]
    each, total = 1.0 + np.arange(size), size * (size + 1) / 2
    verb, xs = name.replace("grouped_", "").split("_")[0], [x] if "grouped" in name else x
    options, values = {
        "allreduce": ({"op": hvd.Sum}, np.full(count, total)),
        "broadcast": ({"root_rank": size - 1}, np.full(count, each[-1])),
        "allgather": ({}, np.repeat(each, count)),
        "alltoall": ({}, np.repeat(each, count // size)),
        "reducescatter": ({"op": hvd.Sum}, np.full(count // size, total)),
    }[verb]
    return getattr(hvd, name)(xs, **options), values


@pytest.mark.parametrize("streams", ["one", "default and another", "two"])
@pytest.mark.parametrize("name", NAMES)
def check_synchronize_on_another_stream(framework, double, device, name, streams):
    hvd, count = framework.hvd, 1500 * framework.hvd.size()
    first = 0 if "default" in streams else double.new_stream(device)
    second = first if streams == "one" else double.new_stream(device)
    for _ in range(5):
        with double.on(device, first):
            x = framework.tensor(np.full(count, 1.0 + hvd.rank()), "float32")
            handle, values = start(hvd, name, x)
        with double.on(device, second):
            result = hvd.synchronize(handle)
            result = result[0] if "grouped" in name or "alltoall" in name else result
            framework.expect(result, values, "float32")
        with double.on(device, first):  # that of the submission goes on behind the outputs, too
            if name.endswith("_"):
                framework.expect(x, values, "float32")


def check_blocking_operations_on_a_stream(framework, double, device):
    hvd = framework.hvd
    with double.on(device, double.new_stream(device)):
        for count in (1, 1000, 3 * MIB):
            x = framework.tensor(np.full(count, 1.0 + hvd.rank()), "float32")
            total = hvd.size() * (hvd.size() + 1) / 2
            framework.expect(hvd.allreduce(x, op=hvd.Sum), np.full(count, total), "float32")
            framework.expect(hvd.allgather(x), np.repeat(1.0 + np.arange(hvd.size()), count), "float32")
            framework.expect(hvd.allreduce_(x, op=hvd.Sum), np.full(count, total), "float32")
            framework.expect(x, np.full(count, total), "float32")


def check_operations_of_several_streams_at_a_time(framework, double, device):
    hvd = framework.hvd
    streams = [0, *(double.new_stream(device) for _ in range(3))]
    for step in range(5):
        handles = []
        for i in range(12):
            with double.on(device, streams[i % 4]):
                x = framework.tensor(np.full(1000 * (i + 1), float(i + step)), "float32")
                handles.append(hvd.allreduce_async_(x, op=hvd.Sum, name=f"several.{i}"))
        with double.on(device, streams[step % 4]):
            for i, handle in enumerate(handles):
                framework.expect(hvd.synchronize(handle), np.full(1000 * (i + 1), (i + step) * hvd.size()), "float32")


def check_memory_that_is_used_again(framework, double, device):
    """Tensors and outputs are dropped as soon as the program may, and others lie where they were."""
    hvd = framework.hvd
    for i in range(50):
        x = framework.tensor(np.full(5000, float(i)), "float32")
        y = hvd.allreduce(x, op=hvd.Max)
        del x
        x = framework.tensor(np.full(5000, -1.0), "float32")
        z = hvd.allreduce(y, op=hvd.Sum)
        del y
        handle = hvd.allreduce_async(x, op=hvd.Sum)
        del x
        framework.expect(z, np.full(5000, i * hvd.size()), "float32")
        framework.expect(hvd.synchronize(handle), np.full(5000, -hvd.size()), "float32")


def check_nothing_is_left_of_places(framework, double, device):
    from lightcc.core import request
    hvd, x = framework.hvd, framework.tensor(np.ones(5), "float32")
    for handle in (hvd.allreduce_async(x), hvd.allgather_async(x), hvd.grouped_allreduce_async([x, x])):
        assert request._places[handle].stream == 0
        hvd.synchronize(handle)
    hvd.allgather(x)
    hvd.grouped_allreduce([x, x])
    assert request._places == {}
    with contextlib.suppress(hvd.HorovodInternalError):  # another rank has left already
        hvd.allreduce_async(x)
    hvd.shutdown()
    assert request._places == {}
    hvd.init()


# Large tensors: several slices of 4 MiB and an odd rest

@pytest.mark.parametrize("count, dtype", [(9 * MIB + 5, "uint8"), (3 * MIB + 1, "float32")])
def check_several_slices(framework, count, dtype):
    if dtype not in framework.dtypes:
        pytest.skip(f"no {dtype}")
    hvd = framework.hvd
    size, me = hvd.size(), hvd.rank()

    def values(rank):
        return (np.arange(count) + 3 * rank) % 11
    x, total = framework.tensor(values(me), dtype), sum(values(rank) for rank in range(size))
    framework.expect(hvd.allreduce(x, op=hvd.Sum), total, dtype)
    framework.expect(hvd.broadcast(x, size - 1), values(size - 1), dtype)
    framework.expect(hvd.allgather(x), np.concatenate([values(rank) for rank in range(size)]), dtype)
    framework.expect(hvd.reducescatter(x, op=hvd.Sum), np.array_split(total, size)[me], dtype)
    splits = [len(part) for part in np.array_split(np.arange(count), size)]
    framework.expect(hvd.alltoall(x, splits)[0],
                     np.concatenate([np.array_split(values(rank), size)[me] for rank in range(size)]), dtype)
    small = framework.tensor([me], "float32")
    results = hvd.grouped_allreduce([small, x, small, x], op=hvd.Sum)
    for result in results[1::2]:
        framework.expect(result, total, dtype)
    for result in results[::2]:
        framework.expect(result, [sum(range(size))], "float32")


# With what else there is

def check_process_sets(framework):
    hvd = framework.hvd
    members = list(range(0, hvd.size(), 2))
    some = hvd.add_process_set(members)
    x = framework.tensor(np.full(1000, 1.0 + hvd.rank()), "float32")
    for _ in range(3):
        if hvd.rank() in members:
            each = np.array([1.0 + rank for rank in members])
            framework.expect(hvd.allreduce(x, op=hvd.Sum, process_set=some), np.full(1000, each.sum()), "float32")
            framework.expect(hvd.allgather(x, process_set=some), np.repeat(each, 1000), "float32")
            handle = hvd.broadcast_async_(x[:10], members[-1], process_set=some)
            framework.expect(hvd.synchronize(handle), np.full(10, each[-1]), "float32")
            x = framework.tensor(np.full(1000, 1.0 + hvd.rank()), "float32")
        framework.expect(hvd.allreduce(x, op=hvd.Max), np.full(1000, float(hvd.size())), "float32")
    hvd.remove_process_set(some)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def check_adasum(framework, dtype):
    if dtype not in framework.dtypes:
        pytest.skip(f"no {dtype}")
    hvd = framework.hvd
    case = type("Case", (), {"framework": framework, "dtype": dtype})
    xs = [framework.tensor(numbers(shape, hvd.rank()), dtype) for shape in SHAPES]
    results = [hvd.allreduce(x, op=hvd.Adasum) for x in xs]
    for outputs in (results, hvd.grouped_allreduce(xs, op=hvd.Adasum)):
        for shape, output in zip(SHAPES, outputs):
            rounded = [framework.values(framework.tensor(numbers(shape, rank), dtype)) for rank in range(hvd.size())]
            expect_near(case, output, adasum(rounded))


def check_compression(framework, monkeypatch):
    """What tensors of GPUs come to is what those of the host come to, on ranks that are each a node, and so is what is
    left behind, whether the host compresses or the GPU; it goes on from what was saved."""
    from lightcc.compress import codec, residuals
    from lightcc.compress.compressors import Int8, TopK
    hvd = framework.hvd
    monkeypatch.setenv("LIGHT_INTRA_SIZE", "1")

    def left_behind(compression):
        one = codec.codec_of(compression)
        places = {(tensor["group"], tensor["name"], tensor["tensor"]): str(tensor["tensor"])
                  for tensor in one.state()["tensors"]}
        return residuals.read(one, places, hvd.rank(), hvd.size()), {name: place for place, name in places.items()}

    def step(compression, tensor, at, name):
        values = np.random.default_rng([at, hvd.rank()]).standard_normal((128, 96))
        xs = [tensor(values, "float32"), tensor(2 * values, "float32")]
        outputs = codec.allreduce(xs, compression, name, hvd.Sum, 1.0, 1.0, hvd.global_process_set)
        return [np.asarray(framework.values(each) if tensor == framework.tensor else each, np.float64)
                for each in outputs]

    for kind, on in ((kind, on) for kind in (lambda: TopK(0.05), lambda: TopK(0.05, momentum_correction=0.5), Int8)
                     for on in "01"):
        hvd.shutdown()
        monkeypatch.setenv("LIGHTCC_GPU_COMPRESSION", on)
        hvd.init()
        ways = (kind(), framework.tensor, "on_gpu"), (kind(), framework.on_host, "on_host")
        for at in range(4):
            mine, other = (step(compression, tensor, at, name) for compression, tensor, name in ways)
            np.testing.assert_array_equal(mine, other)
        stats = codec.stats([codec.codec_of(ways[0][0])])
        if hvd.size() == 1:
            assert stats["route"] == ""
            continue
        assert 0 < stats["sent_bytes"] < stats["dense_sent_bytes"], stats
        assert stats["route"] == ("gpu" if on == "1" else "host"), stats
        (saved, places), (same_saved, _) = (left_behind(way[0]) for way in ways)
        for name, tensor in saved["tensors"].items():
            for piece, same in zip(tensor["pieces"], same_saved["tensors"][name]["pieces"]):
                assert piece == same and any(piece["values"])
        later = [(kind(), *way[1:]) for way in ways]
        for compression, _, name in later:
            assert residuals.write(codec.codec_of(compression), {
                tensor: ((group, name, index), 128 * 96) for tensor, (group, _, index) in places.items()}, saved) == []
        for at in range(4, 6):
            mine, other = (step(compression, tensor, at, name) for compression, tensor, name in later)
            np.testing.assert_array_equal(mine, other)
    hvd.shutdown()
    monkeypatch.delenv("LIGHT_INTRA_SIZE")
    monkeypatch.delenv("LIGHTCC_GPU_COMPRESSION")
    hvd.init()


def check_prepared_requests(job, double, device):
    """Their stream is that of the time when they were prepared."""
    from lightcc.core import lib, request
    from lightcc.core.adapter import adapter_of
    stream = double.new_stream(device)
    with double.on(device, stream):
        x = gpu_double.StandardArray.of(double, device, np.zeros(1000, np.float32))
        address, dtype, shape, place = adapter_of(x).describe(x)
        prepared = request.prepare(lib.ALLREDUCE, address, dtype, shape, "prepared", job.global_process_set,
                                   lib.SUM, 1.0, 1.0, place=place)
        for step in range(3):
            double.write(device, address, np.full(1000, step + job.rank(), np.float32))
            lib.finish(lib.check(lib.start(prepared)))
            assert (x.get() == sum(step + rank for rank in range(job.size()))).all()
    lib.discard(prepared)
