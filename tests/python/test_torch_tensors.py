"""Tensors as torch programs have them: parameters, views, results of other operations, under every mode of torch."""
import copy
import io
import os
import threading
import warnings

import numpy as np
import pytest
import torch

import lightcc.torch as hvd
import ranks

pytestmark = pytest.mark.usefixtures("job")


@pytest.mark.parametrize("np", (1, 2))
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


def total():
    return float(sum(1 + rank for rank in range(hvd.size())))


def mine(*shape):
    return torch.full(shape, 1.0 + hvd.rank())


VERBS = {
    "allreduce": lambda x: hvd.allreduce(x, op=hvd.Sum),
    "allreduce_async": lambda x: hvd.synchronize(hvd.allreduce_async(x, op=hvd.Sum)),
    "grouped_allreduce": lambda x: hvd.grouped_allreduce([x], op=hvd.Sum)[0],
    "allgather": hvd.allgather,
    "grouped_allgather": lambda x: hvd.grouped_allgather([x])[0],
    "broadcast": lambda x: hvd.broadcast(x, 0),
    "alltoall": hvd.alltoall,
    "alltoall with splits": lambda x: hvd.alltoall(x, [x.shape[0] // hvd.size()] * hvd.size())[0],
    "reducescatter": lambda x: hvd.reducescatter(x, op=hvd.Sum),
    "grouped_reducescatter": lambda x: hvd.grouped_reducescatter([x], op=hvd.Sum)[0],
}
IN_PLACE = {
    "allreduce_": lambda x: hvd.allreduce_(x, op=hvd.Sum),
    "allreduce_async_": lambda x: hvd.synchronize(hvd.allreduce_async_(x, op=hvd.Sum)),
    "grouped_allreduce_": lambda x: hvd.grouped_allreduce_([x], op=hvd.Sum)[0],
    "grouped_allreduce_async_": lambda x: hvd.synchronize(hvd.grouped_allreduce_async_([x], op=hvd.Sum))[0],
    "broadcast_": lambda x: hvd.broadcast_(x, hvd.size() - 1),
    "broadcast_async_": lambda x: hvd.synchronize(hvd.broadcast_async_(x, hvd.size() - 1)),
}


def result_in_place(verb):
    return total() if "reduce" in verb else float(hvd.size())


# What is written where

@pytest.mark.parametrize("verb", IN_PLACE)
def check_a_leaf_that_requires_a_gradient_may_be_written(verb):
    parameter = torch.nn.Parameter(mine(3))
    assert IN_PLACE[verb](parameter) is parameter
    assert isinstance(parameter, torch.nn.Parameter) and parameter.is_leaf and parameter.requires_grad
    assert (parameter == result_in_place(verb)).all()
    (2 * parameter).sum().backward()
    assert parameter.grad.tolist() == [2.0] * 3


@pytest.mark.parametrize("verb", IN_PLACE)
def check_only_the_view_is_written(verb):
    whole = mine(6, 2)
    before = whole.clone()
    IN_PLACE[verb](whole[2:4])
    assert (whole[2:4] == result_in_place(verb)).all()
    assert torch.equal(whole[:2], before[:2]) and torch.equal(whole[4:], before[4:])


@pytest.mark.parametrize("verb", VERBS)
def check_views_are_read_where_they_are_and_stay_as_they_are(verb):
    size = hvd.size()
    whole = torch.arange(6.0 * size).view(3 * size, 2)
    before, part = whole.clone(), whole[size:2 * size]
    assert torch.equal(VERBS[verb](part), VERBS[verb](part.clone()))
    assert torch.equal(whole, before)


NOT_CONTIGUOUS = {  # 12 rows: they can be cut equally among up to four ranks
    "transposed": lambda: torch.ones(4, 12).t(),
    "expanded": lambda: torch.ones(1).expand(12),
    "every other": lambda: torch.ones(24)[::2],
    "channels last": lambda: torch.ones(12, 3, 4, 4).to(memory_format=torch.channels_last),
    "columns": lambda: torch.ones(12, 6)[:, :2],
}


@pytest.mark.parametrize("how", NOT_CONTIGUOUS)
def check_not_contiguous(how):
    x = NOT_CONTIGUOUS[how]()
    for verb in {**VERBS, **IN_PLACE}.values():
        with pytest.raises(ValueError, match="Tensor is required to be contiguous."):
            verb(x)
    assert (x == 1).all()


@pytest.mark.parametrize("verb", VERBS)
def check_results_are_ordinary_tensors(verb):
    result = VERBS[verb](mine(2 * hvd.size(), 3))
    assert type(result) is torch.Tensor and result.is_contiguous() and not result.requires_grad and result.is_leaf
    before = result.clone()
    again = VERBS[verb](mine(2 * hvd.size(), 3))  # in memory of its own
    again.zero_()
    assert torch.equal(result, before)
    file = io.BytesIO()
    torch.save(result, file)
    file.seek(0)
    for copied in (copy.deepcopy(result), torch.load(file), torch.from_numpy(result.numpy().copy())):
        assert torch.equal(copied, before)
    result.add_(1)
    result.requires_grad_()
    result.sum().backward()
    assert torch.equal(result.detach(), before + 1) and torch.equal(result.grad, torch.ones_like(before))


def check_parameters_and_results_of_operations_are_read():
    parameter = torch.nn.Parameter(mine(2 * hvd.size(), 2))
    for verb in VERBS.values():
        assert torch.equal(verb(parameter).detach(), verb(parameter.detach()))
        assert torch.equal(verb(parameter * 1).detach(), verb(parameter.detach()))


# Shapes, lists, numbers

def check_scalars_and_empty_tensors():
    for verb in ("allreduce", "allreduce_async", "grouped_allreduce", "broadcast"):
        for shape in ((), (0,), (3, 0, 2)):
            assert VERBS[verb](mine(*shape)).shape == shape
    for verb in IN_PLACE.values():
        for shape in ((), (0,), (3, 0, 2)):
            assert verb(mine(*shape)).shape == shape
    for verb, call in VERBS.items():
        for shape in ((0,), (hvd.size(), 0)):
            assert call(mine(*shape)).numel() == 0, verb
    assert hvd.allreduce(torch.tensor(2.0), op=hvd.Sum).item() == 2.0 * hvd.size()


def check_groups_of_many_kinds():
    xs = [torch.ones((), dtype=torch.float64), mine(0, 2), mine(3).to(torch.bfloat16),
          torch.ones(2, 2, dtype=torch.bool), torch.arange(5), *[mine(i % 7) for i in range(100)]]
    for given in (xs, tuple(xs)):
        results = hvd.grouped_allreduce(given, op=hvd.Max)
        assert isinstance(results, list) and len(results) == len(xs)
        for x, result in zip(xs, results):
            assert (result.dtype, result.shape) == (x.dtype, x.shape)
    gathered = hvd.grouped_allgather(xs[1:])
    assert [len(result) for result in gathered] == [len(x) * hvd.size() for x in xs[1:]]


def check_numbers_of_numpy_and_torch():
    x = torch.ones(4)
    for half in (np.float64(0.5), np.float32(0.5), torch.tensor(0.5)):
        assert (hvd.allreduce(x, op=hvd.Sum, prescale_factor=half, postscale_factor=half) == hvd.size() / 4).all()
    for root in (np.int64(0), torch.tensor(0)):
        assert (hvd.broadcast(mine(2), root) == 1).all()
    size = hvd.size()
    for splits in ([1] * size, (1,) * size, [np.int64(1)] * size, list(torch.ones(size, dtype=torch.int64)),
                   np.ones(size, np.int32), torch.ones(size, dtype=torch.int32), iter([1] * size), [True] * size):
        output, received = hvd.alltoall(mine(size), splits)
        assert output.tolist() == [1.0 + rank for rank in range(size)] and received.tolist() == [1] * size
        assert type(received) is torch.Tensor and received.dtype == torch.int32 and not received.is_cuda


def check_integers_are_scaled_in_double_and_truncated():
    for dtype in (torch.int8, torch.int16, torch.int32, torch.int64):
        x = torch.tensor([-7, -1, 0, 1, 7], dtype=dtype)
        scaled = [-3 * hvd.size(), 0, 0, 0, 3 * hvd.size()]
        assert hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5).tolist() == scaled
        assert hvd.allreduce(x, prescale_factor=0.5).tolist() == [-3, 0, 0, 0, 3]
        assert hvd.allreduce(x, op=hvd.Sum, postscale_factor=0.5).tolist() == \
            [int(value * hvd.size() / 2) for value in (-7, -1, 0, 1, 7)]
    large = torch.tensor([2 ** 62 // hvd.size(), -(2 ** 53) - 1], dtype=torch.int64)
    assert hvd.allreduce(large, op=hvd.Sum).tolist() == [value * hvd.size() for value in large.tolist()]  # exact


def check_narrow_floats_are_added_up_in_float32():
    big = torch.full((3,), 60_000.0, dtype=torch.float16)
    assert torch.equal(hvd.allreduce(big), big)  # their sum is no float16
    quarter = torch.full((3,), hvd.size() * 15_000.0).to(torch.float16)
    assert torch.equal(hvd.allreduce(big, op=hvd.Sum, postscale_factor=0.25), quarter)
    for dtype, gap in ((torch.float16, 2048.0), (torch.bfloat16, 256.0)):  # from here on only even numbers have a place
        x = torch.tensor([gap if hvd.rank() == 0 else 1.0], dtype=dtype)
        expected = torch.tensor((gap + hvd.size() - 1) / 2).to(dtype)
        assert hvd.allreduce(x, op=hvd.Sum, postscale_factor=0.5).item() == expected.item()


# Modes of torch

@pytest.mark.parametrize("verb", {**VERBS, **IN_PLACE})
def check_modes(verb):
    call = {**VERBS, **IN_PLACE}[verb]
    expected = call(mine(hvd.size(), 2))
    for mode in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16)):
        with mode:
            assert torch.equal(call(mine(hvd.size(), 2)), expected)
    torch.set_default_dtype(torch.float64)
    try:
        assert call(mine(hvd.size(), 2).float()).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("verb", VERBS)
def check_the_default_device_does_not_matter(verb):
    """It is that of new tensors without a device, as after torch.set_default_device("cuda")."""
    inputs = [mine(*shape).requires_grad_(needed) for shape in ((hvd.size(), 2), (0, 2)) for needed in (False, True)]
    with torch.device("meta"):
        for x in inputs:
            result = VERBS[verb](x)
            assert result.device.type == "cpu"
            if result.requires_grad:
                result.backward(torch.ones(result.shape, device="cpu"))
                assert x.grad.device.type == "cpu" and x.grad.shape == x.shape
        assert hvd.alltoall(inputs[0], [1] * hvd.size())[1].device.type == "cpu"


def check_started_in_one_thread_and_waited_for_in_another():
    handles = [hvd.allreduce_async(mine(1000 * i), op=hvd.Sum) for i in range(20)]
    results = []
    thread = threading.Thread(target=lambda: results.extend(map(hvd.synchronize, reversed(handles))))
    thread.start()
    thread.join()
    assert len(results) == 20 and all((result == total()).all() for result in results)


@pytest.mark.parametrize("dtype", ["complex64", "complex128", "float8_e5m2"])
def check_dtypes_that_cannot_be_sent_are_named(dtype):
    x = torch.ones(12, 2).to(getattr(torch, dtype))
    for verb in {**VERBS, **IN_PLACE}.values():
        with pytest.raises(ValueError, match=f"Tensor type torch.{dtype} is not supported"):
            verb(x)


def check_tensors_of_other_kinds(job):
    for x, text in ((torch.ones(2, device="meta"), "meta"), (torch.ones(2, 2).to_sparse(), "sparse")):
        with pytest.raises(ValueError, match=text):
            hvd.allreduce(x)
    assert hvd.allreduce(torch.ones(1)) == 1


def check_a_forked_child_may_read_results():
    """Workers of a DataLoader do: what they load may be made of what a collective returned."""
    results = [verb(mine(12, 1000)) for verb in VERBS.values()]
    sums = [float(result.sum()) for result in results]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: this process has threads
        child = os.fork()
    if child == 0:
        os._exit(0 if [sum(result.view(-1).tolist()) for result in results] == sums else 1)
    assert os.waitpid(child, 0) == (child, 0)
    assert (hvd.allreduce(torch.ones(2), op=hvd.Sum) == hvd.size()).all()
