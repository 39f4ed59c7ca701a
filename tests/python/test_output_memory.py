"""The memory of outputs of operations that are not in place: used again once nobody refers to it, and never before."""
import io
import os
import threading
import time

import numpy as np
import pytest
import torch

import lightcc.numpy
import lightcc.torch as hvd
import ranks
from lightcc.core import lib
from lightcc.core.adapter import adapter_of
from lightcc.core.torch_outputs import OutputPool

pytestmark = pytest.mark.usefixtures("job")

FLOATS = 1 << 18  # 1 MiB
VERBS = {
    "allreduce": lambda hvd, x: hvd.allreduce(x, op=hvd.Sum),
    "allreduce_async": lambda hvd, x: hvd.synchronize(hvd.allreduce_async(x, op=hvd.Sum)),
    "grouped_allreduce": lambda hvd, x: hvd.grouped_allreduce([x], op=hvd.Sum)[0],
    "broadcast": lambda hvd, x: hvd.broadcast(x, 0),
    "allgather": lambda hvd, x: hvd.allgather(x),
    "alltoall": lambda hvd, x: hvd.alltoall(x),
    "reducescatter": lambda hvd, x: hvd.reducescatter(x.repeat(hvd.size()), op=hvd.Sum),
}
# What can keep an output's memory, and how to read the third number there.
REFERENCES = {
    "the tensor": (lambda y: y, lambda r: r[2]),
    "a view": (lambda y: y.view(2, -1), lambda r: r[0, 2]),
    "a slice": (lambda y: y[2:3], lambda r: r[0]),
    "a detached slice": (lambda y: y.detach()[2:3], lambda r: r[0]),
    "a parameter": (torch.nn.Parameter, lambda r: r.detach()[2]),
    "an array": (lambda y: y.numpy()[2:3], lambda r: r[0]),
    "a buffer": (lambda y: memoryview(y.numpy()), lambda r: r[2]),
    "a capsule": (torch.utils.dlpack.to_dlpack, lambda r: torch.utils.dlpack.from_dlpack(r)[2]),
    "the storage": (lambda y: y.untyped_storage(), lambda r: torch.tensor([]).set_(r, 2, (1,))),
    "autograd": (lambda y: torch.ones_like(y).requires_grad_() * y, lambda r: grad_of_product(r)[2]),
}


@pytest.mark.parametrize("np", (1, 2))
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


def grad_of_product(product):
    ones = product.grad_fn.next_functions[0][0].variable
    product.sum().backward()
    return ones.grad


def mine(value=1.0, like=torch):
    return like.full((FLOATS,), value) if like is torch else np.full(FLOATS, value, "float32")


def pool():
    return adapter_of(torch.ones(1)).empty_like.__self__


@pytest.mark.parametrize("of", (hvd, lightcc.numpy), ids=("torch", "numpy"))
@pytest.mark.parametrize("verb", VERBS)
def check_memory_is_used_again(verb, of):
    x = mine(1.0, torch if of is hvd else np)
    addresses = set()
    for i in range(12):
        x[:] = float(i)
        y = VERBS[verb](of, x)  # the former one is dropped after this one is made
        addresses.add(y.data_ptr() if of is hvd else y.ctypes.data)
        assert y[0] == y[-1] == i * (hvd.size() if "reduce" in verb else 1)
    assert len(addresses) == 2


@pytest.mark.parametrize("verb", ("allreduce", "allgather"))  # memory of torch's, and of the core's
@pytest.mark.parametrize("kind", REFERENCES)
def check_memory_is_left_alone_while_anyone_refers_to_it(kind, verb):
    refer, read = REFERENCES[kind]
    expected = 5.0 * (hvd.size() if "reduce" in verb else 1)
    y = VERBS[verb](hvd, mine(5.0))
    reference = refer(y)
    del y
    later = [VERBS[verb](hvd, mine(7.0)) for _ in range(3)]
    assert float(read(reference)) == expected
    del later, reference


def check_arrays_keep_it_too():
    for refer in (lambda y: y[5:6], memoryview, torch.from_numpy, lambda y: y.reshape(2, -1).T):
        reference = refer(lightcc.numpy.allreduce(mine(5.0, np), op=hvd.Max))
        later = [lightcc.numpy.allreduce(mine(7.0, np), op=hvd.Max) for _ in range(3)]
        assert float(np.asarray(reference).ravel()[0]) == 5
        del later, reference


def check_what_is_saved_is_the_output_alone():
    for _ in range(2):  # of fresh memory, and of memory that was another's
        for y in (hvd.allreduce(mine()), hvd.allgather(mine())):
            file = io.BytesIO()
            torch.save(y, file)
            assert file.tell() < y.nbytes + 10_000
            file.seek(0)
            assert torch.equal(torch.load(file), y)


def check_resize():
    hvd.allreduce(mine(), op=hvd.Max).numpy()  # from then on torch does not let it be resized
    y = hvd.allreduce(mine(3.0), op=hvd.Max)
    y.resize_(2 * FLOATS)
    assert float(y[FLOATS - 1]) == 3
    y[:] = 4
    later = [hvd.allreduce(mine(7.0), op=hvd.Max) for _ in range(3)]
    assert float(y.sum()) == 8 * FLOATS
    del y
    y = hvd.allreduce(mine(3.0), op=hvd.Max)
    y.untyped_storage().resize_(0)
    del y
    assert all(float(hvd.allreduce(mine(2.0), op=hvd.Max)[-1]) == 2 for _ in range(3))
    del later


def check_share_memory():
    y = hvd.allreduce(mine(3.0), op=hvd.Max).share_memory_()
    child = os.fork()
    if child == 0:
        y[0] = 9
        os._exit(0)
    os.waitpid(child, 0)
    assert float(y[0]) == 9 and float(y[1]) == 3
    del y
    assert not any(hvd.allreduce(mine(), op=hvd.Max).is_shared() for _ in range(3))


def check_a_child_that_writes_leaves_the_parents_alone():
    held = [hvd.allreduce(mine(3.0), op=hvd.Max), hvd.allgather(mine(3.0)),
            lightcc.numpy.allreduce(mine(3.0, np), op=hvd.Max)]
    child = os.fork()
    if child == 0:
        for output in held:
            output[:] = 9
        held.clear()  # the blocks of the parent's core go back in the child too
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert [float(output[0]) for output in held] == [3, 3, 3]
    hvd.barrier()


def check_layout_and_kind_are_those_of_empty_like():
    weights = torch.nn.Parameter(torch.ones(FLOATS // 4, 2, 2))
    for _ in range(3):
        y = hvd.allreduce(weights.detach().view(2, -1, 2), op=hvd.Max)
        assert type(y) is torch.Tensor and y.shape == (2, FLOATS // 4, 2) and y.is_contiguous()
        assert not y.requires_grad and y._base is None and y.storage_offset() == 0
        with torch.inference_mode():
            assert hvd.allreduce(weights.detach(), op=hvd.Max).is_inference()


# Without a job

class Limits:
    def __init__(self, monkeypatch, most_bytes, idle_s):
        self.now = 0.0
        monkeypatch.setattr(lib, "initialized", lambda: True)
        monkeypatch.setattr(lib, "output_pool", lambda: (most_bytes, idle_s))
        monkeypatch.setattr(lib, "after_epoch", [])

    def pool(self, watches=False, clock=None):
        pool = OutputPool(torch, clock or (lambda: self.now), watches)
        pool._limits = (-1, 0, 0.0)  # of no epoch
        return pool


@pytest.fixture
def alone(monkeypatch):
    return lambda most_bytes, idle_s: Limits(monkeypatch, most_bytes, idle_s)


def test_no_more_is_held_than_may_be(alone):
    pool = alone(5 << 20, 10).pool()
    held = [pool.empty_like(mine()) for _ in range(7)]
    assert pool.held_bytes() == 5 << 20
    first, last = held[0].data_ptr(), held[-1].data_ptr()
    held.clear()
    assert pool.empty_like(mine()).data_ptr() == last != first
    pool.empty_like(torch.ones(2 << 20))
    assert pool.held_bytes() == 5 << 20, "a tensor that is larger than all of it"


def test_what_is_idle_is_forgotten(alone):
    limits = alone(1 << 30, 10)
    pool = limits.pool()
    pool.empty_like(mine())
    limits.now = 4
    held = pool.empty_like(torch.ones(1 << 20))
    assert pool.forget_idle() == 6 and pool.held_bytes() == 5 << 20
    limits.now = 10
    assert pool.forget_idle() == 4 and pool.held_bytes() == 4 << 20
    limits.now = 14
    assert pool.forget_idle() == 0 and pool.held_bytes() == 0
    assert held.fill_(1).sum() == 1 << 20


def test_a_thread_forgets_and_ends(alone):
    for idle_s, forget in ((0.01, lambda pool: None), (3600, OutputPool.forget_all)):
        pool = alone(1 << 30, idle_s).pool(watches=True, clock=time.monotonic)
        for _ in range(2):
            pool.empty_like(mine())
            watchers = [thread for thread in threading.enumerate() if thread is pool._watcher]
            forget(pool)
            for watcher in watchers:
                watcher.join(20)
                assert not watcher.is_alive()
            assert pool.held_bytes() == 0


def test_nothing_is_held_where_references_cannot_be_counted(alone, monkeypatch):
    pool = alone(1 << 30, 10).pool()
    pool._count = None  # as before PyTorch 2.1
    assert pool.empty_like(mine()).numel() == FLOATS
    assert pool.held_bytes() == 0
    monkeypatch.setattr("lightcc.core.torch_outputs._Block.references", lambda block, count: (1, 2))  # always the same
    pool = alone(1 << 30, 10).pool()
    assert pool.empty_like(mine()).numel() == FLOATS
    assert pool.held_bytes() == 0


def test_small_and_special_tensors_are_torchs_own(alone):
    pool = alone(1 << 30, 10).pool()
    sparse = torch.sparse_coo_tensor((FLOATS, 2), check_invariants=True)
    for x in (torch.ones(100), torch.ones(FLOATS, device="meta"), sparse, torch.ones((0, FLOATS))):
        assert pool.empty_like(x).shape == x.shape
    assert pool.held_bytes() == 0


def test_memory_does_not_grow_over_many_calls():
    out = ranks.run_script("""
import os, random
os.environ["LIGHTCC_OUTPUT_POOL_BYTES"] = str(32 << 20)
import numpy as np, psutil, torch
import lightcc.numpy, lightcc.torch
lightcc.torch.init()
random.seed(5)
kinds = (lightcc.torch, torch.ones(3 << 18)), (lightcc.numpy, np.ones(3 << 18, "float32"))
seen = []
for call in range(10_000):
    hvd, x = kinds[call % 2]
    count = int(2 ** random.uniform(4, 19.5)) // 2 * 2
    y = (hvd.allreduce, hvd.allgather, hvd.alltoall)[call % 3](x[:count])
    if call % 1000 == 999:
        seen.append(psutil.Process().memory_info().rss)
assert max(seen[2:]) - seen[1] < 48 << 20, seen
print("flat")
""", 1)
    assert "flat" in out


def test_after_an_error_nothing_is_used_again():
    out = ranks.run_script("""
import torch
import lightcc.torch as hvd
from lightcc.core import lib
from lightcc.core.adapter import adapter_of
hvd.init()
x = torch.ones(1 << 19)
pool = adapter_of(x).empty_like.__self__
hvd.allreduce(x)
assert pool.held_bytes() == x.nbytes
if hvd.rank() == 0:
    handle = hvd.allreduce_async(x, name="in flight")
hvd.barrier()
try:
    if hvd.rank() == 0:
        lib.interrupted()
        hvd.synchronize(handle)
    while True:
        hvd.allreduce(x, name="never done")
except hvd.HorovodInternalError as error:
    print("ended")
assert pool.held_bytes() == 0
hvd.shutdown()
hvd.init()
for _ in range(3):
    assert hvd.allreduce(2 * x, op=hvd.Sum)[-1] == 4
assert pool.held_bytes() == x.nbytes
""", 2)
    assert out.count("ended") == 2
