"""Weights that differ between the ranks are found: hvd.check_weights and HOROVOD_CHECK_WEIGHTS, with PyTorch."""
import functools
import re

import pytest
import torch

import lightcc.torch as hvd
import ranks
from lightcc.torch.weights import _CHUNK, digests

EVERY = 3
pytestmark = pytest.mark.usefixtures("job")


@pytest.mark.parametrize("np", ranks.SIZES)
def test_on_fresh_ranks(np):
    ranks.run_checks(__file__, np, HOROVOD_CHECK_WEIGHTS=str(EVERY))


DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
          torch.float32, torch.float64, torch.complex64, torch.complex128)
FORMS = {"plain": lambda x: x, "scalar": lambda x: x.flatten()[0], "empty": lambda x: x[:0],
         "transposed": lambda x: x.t().contiguous().t(), "strided": lambda x: x.repeat(2, 2)[::2, ::2],
         "expanded": lambda x: x[:1].expand(4, -1)}


def digest(tensor):
    return digests([("x", tensor)])["x"]


def tensors():
    generator = torch.Generator().manual_seed(2)
    for dtype in DTYPES:
        x = torch.randint(0, 2 if dtype is torch.bool else 100, (4, 6), generator=generator).to(dtype)
        for form, change in FORMS.items():
            yield f"{dtype} {form}", change(x)


def check_digests_are_of_bits():
    for name, x in tensors():
        assert digest(x) == digest(x.clone(memory_format=torch.contiguous_format)), name
        assert -2**63 <= digest(x) < 2**63
    nan = torch.tensor([float("nan"), 1.0])
    assert digest(nan) == digest(nan.clone())
    assert digest(torch.tensor([0.0])) != digest(torch.tensor([-0.0]))
    assert digest(torch.ones(3).to_sparse()) == digest(torch.ones(3))
    x = torch.arange(4.0)
    assert digest(x) != digest(x.flip(0)), "places count"


def check_every_bit_counts():
    for name, x in tensors():
        x = x.clone(memory_format=torch.contiguous_format)
        before, raw = digest(x), x.view(-1).view(torch.uint8).numpy()
        for byte in range(0, raw.size, 3):
            for bit in (0,) if x.dtype is torch.bool else (0, 3, 7):
                raw[byte] ^= 1 << bit
                assert digest(x) != before, (name, byte, bit)
                raw[byte] ^= 1 << bit
        assert digest(x) == before


def check_tensors_of_several_chunks():
    """Beside the definition, in Python's integers."""
    x = torch.zeros(2 * _CHUNK + 3, dtype=torch.int8)
    before, seen = digest(x), set()
    for place in (0, _CHUNK - 1, _CHUNK, 2 * _CHUNK + 2):
        x[place] = 1
        seen.add(digest(x))
        x[place] = 0
    assert len(seen) == 4 and before not in seen

    def term(i, value):
        h = (value - 0x61C8864680B583EB * i) % 2**64
        return h * (2 * h + 1)
    x[_CHUNK + 1] = 1
    change = term(_CHUNK + 1, 1) - term(_CHUNK + 1, 0)
    assert (digest(x) - before - change) % 2**64 == 0


# Ranks

def new_model():
    torch.manual_seed(4)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))


def optimizer_of(model, **options):
    return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), **options)


def step(model, optimizer, seed=0):
    optimizer.zero_grad()
    generator = torch.Generator().manual_seed(seed + hvd.rank())
    model(torch.randn(5, 3, generator=generator)).square().sum().backward()
    optimizer.step()


needs_ranks = functools.partial(pytest.mark.skipif, "__import__('lightcc.torch').torch.size() == 1",
                                reason="one rank has nobody to differ from")


def off(rank, parameter, by=1.0):
    """Changes a parameter on one rank."""
    if hvd.rank() == rank:
        with torch.no_grad():
            parameter.view(-1)[0] += by


@needs_ranks()
def check_it_says_what_differs_and_where():
    model = new_model()
    hvd.check_weights(model)
    last = hvd.size() - 1
    off(last, model[2].weight, 1e-6)
    with pytest.raises(RuntimeError, match="check_weights: the ranks hold different weights, 1 of 6 param") as error:
        hvd.check_weights(model)
    texts = hvd.allgather_object(str(error.value))
    assert len(set(texts)) == 1, "all ranks say the same"
    others = "rank 0 has" if last == 1 else "ranks " + ", ".join(map(str, range(last))) + " have"
    assert re.search(rf"\n  2\.weight: {others} [0-9a-f]{{16}}; rank {last} has [0-9a-f]{{16}}\n", texts[0]), texts[0]
    assert not isinstance(error.value, hvd.HorovodInternalError), "an elastic job does not begin again"
    off(last, model[2].weight, -1e-6)
    hvd.barrier()  # the next operation works


@needs_ranks()
def check_what_is_compared():
    model = new_model()
    model[1].running_mean += hvd.rank()  # each rank's own batches
    hvd.check_weights(model)
    with pytest.raises(RuntimeError, match=r"1\.running_mean"):
        hvd.check_weights(model.state_dict())
    hvd.check_weights([("a", torch.ones(2)), ("b", torch.ones(()).bfloat16())])
    with pytest.raises(RuntimeError, match="1 of 2 parameters:\n  b: rank 0 has none; rank.* 1"):
        hvd.check_weights({"a": torch.ones(2), **({"b": torch.ones(1)} if hvd.rank() else {}), "note": "no tensor"})
    with pytest.raises(RuntimeError, match=r"12 of 12 parameters(?s:.*)and 2 more"):
        hvd.check_weights({str(i): torch.tensor(hvd.rank()) for i in range(12)})


@needs_ranks()
def check_process_sets():
    first = hvd.add_process_set([0])
    mine = torch.tensor(hvd.rank())
    if hvd.rank() == 0:
        hvd.check_weights({"x": mine}, first)
    hvd.remove_process_set(first)


@needs_ranks()
def check_training_that_is_right():
    for options in ({}, {"backward_passes_per_step": 1, "op": hvd.Adasum}, {"compression": hvd.Compression.topk(0.5)}):
        model = new_model()
        optimizer = optimizer_of(model, **options)
        for seed in range(2 * EVERY + 1):
            step(model, optimizer, seed)


@needs_ranks()
@pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum], ids=["average", "adasum"])
def check_a_drift_is_found(op):
    model = new_model()
    optimizer = optimizer_of(model, op=op)
    step(model, optimizer)
    off(0, model[0].bias)
    with pytest.raises(RuntimeError, match=rf"exchange {EVERY} of gradients: the ranks hold(?s:.*)\n  0\.bias: rank 0"):
        for _ in range(EVERY):
            step(model, optimizer)
    off(0, model[0].bias, -1.0)


@needs_ranks()
def check_what_only_one_rank_has_is_left_out():
    model = new_model()
    own, frozen = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2), requires_grad=False)
    with torch.no_grad():
        own += hvd.rank()
    named = [*model.named_parameters(), ("own", own), ("frozen", frozen)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p for _, p in named], lr=0.1), named)
    optimizer.register_local_var(own)
    for seed in range(EVERY):
        step(model, optimizer, seed)
    with torch.no_grad():
        frozen += hvd.rank()
    with pytest.raises(RuntimeError, match="1 of 7 parameters:\n  frozen: rank 0"):
        for seed in range(EVERY):
            step(model, optimizer, seed)


@needs_ranks()
def check_a_rank_that_leaves_out_a_step():
    """Exchanges are counted, not steps: nobody waits for it."""
    model = new_model()
    optimizer = optimizer_of(model)
    with pytest.raises(RuntimeError, match=f"exchange {EVERY} of gradients"):
        for turn in range(EVERY):
            optimizer.zero_grad()
            model(torch.ones(2, 3) * (1 + hvd.rank())).sum().backward()
            optimizer.synchronize()
            if hvd.rank() or turn:
                with optimizer.skip_synchronize():
                    optimizer.step()


@needs_ranks()
def check_join():
    """Ranks that have joined are not compared, and afterwards all count from the same exchange again."""
    model = new_model()
    optimizer = optimizer_of(model)
    for seed in range(EVERY * (hvd.rank() + 1)):
        step(model, optimizer, seed)
    hvd.join()
    hvd.broadcast_parameters(model.state_dict(), root_rank=hvd.size() - 1)
    for seed in range(EVERY):
        step(model, optimizer, seed)


def check_one_rank_alone():
    if hvd.size() == 1:
        hvd.check_weights(new_model())
        model = new_model()
        step(model, optimizer_of(model))
