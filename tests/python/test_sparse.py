"""Sparse tensors: sparse_allreduce_async, and sparse gradients in DistributedOptimizer, in all its ways."""
import contextlib
import functools
import re
import warnings

import pytest
import torch

import lightcc.torch as hvd
import ranks
from lightcc.torch import sparse
from training import expect_equal

pytestmark = [pytest.mark.torch_sizes, pytest.mark.usefixtures("job")]


@pytest.mark.parametrize("np", ranks.SIZES)
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


# sparse_allreduce_async

SHAPES = {"vector": ((7,), 1), "matrix": ((5, 4), 2), "hybrid": ((6, 3), 1), "hybrid of 4": ((4, 3, 2, 2), 2)}
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8)


def entries(rank, shape, sparse_dims, dtype, count, coalesced=False):
    """So many entries of a rank, some of them at the same place; small, so that sums are exact."""
    generator = torch.Generator().manual_seed(7 * rank + count)
    indices = torch.stack([torch.randint(0, length, (count,), generator=generator) for length in shape[:sparse_dims]])
    values = torch.randint(0, 5, (count, *shape[sparse_dims:]), generator=generator).to(dtype)
    tensor = torch.sparse_coo_tensor(indices, values, shape, check_invariants=True)
    return tensor.coalesce() if coalesced else tensor


def dense_sum(tensors):
    return sum(tensor.to_dense().to(torch.float64) for tensor in tensors)


@pytest.mark.parametrize("coalesced", [False, True], ids=["uncoalesced", "coalesced"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", SHAPES)
def check_sum_and_average(form, dtype, coalesced):
    shape, dims = SHAPES[form]
    every = [entries(rank, shape, dims, dtype, 3 + 2 * rank, coalesced) for rank in range(hvd.size())]
    total = dense_sum(every)
    for op, expected in ((hvd.Sum, total), (hvd.Average, total / hvd.size())):
        wait = hvd.sparse_allreduce_async(every[hvd.rank()], "entries", op)
        assert callable(wait)
        result = wait()
        assert result.is_sparse and result.dtype == dtype and result.shape == shape and result.sparse_dim() == dims
        assert wait() is result
        if dtype.is_floating_point:
            tolerance = {"rtol": 1e-2 if dtype in (torch.float16, torch.bfloat16) else 1e-6, "atol": 0}
            torch.testing.assert_close(result.to_dense().to(torch.float64), expected, **tolerance)
        else:
            assert torch.equal(result.to_dense().to(torch.float64), expected.trunc())


def check_entries_stay_apart_in_rank_order():
    mine = torch.sparse_coo_tensor([[1, 1]], [1.0 + hvd.rank(), 10.0], (3,))
    result = hvd.sparse_allreduce_async(mine, "apart", hvd.Sum)()
    assert not result.is_coalesced()
    assert result._indices().tolist() == [[1, 1] * hvd.size()]
    assert result._values().tolist() == [value for rank in range(hvd.size()) for value in (1.0 + rank, 10.0)]


@pytest.mark.parametrize("who", ["nobody", "the last", "all but the last"])
def check_without_entries(who):
    last = hvd.size() - 1
    counts = [{"nobody": 0, "the last": 4 * (rank == last), "all but the last": 4 * (rank != last)}[who]
              for rank in range(hvd.size())]
    for shape, dims in SHAPES.values():
        every = [entries(rank, shape, dims, torch.float32, count) for rank, count in enumerate(counts)]
        result = hvd.sparse_allreduce_async(every[hvd.rank()], "few", hvd.Sum)()
        assert result._nnz() == sum(counts)
        assert torch.equal(result.to_dense().double(), dense_sum(every))


def check_many_in_flight_and_without_name():
    every = [entries(rank, (5, 2), 1, torch.float32, 4) for rank in range(hvd.size())]
    waits = [hvd.sparse_allreduce_async(every[hvd.rank()] * i, name, hvd.Sum)
             for i in range(5) for name in (f"many.{i}", None)]
    for i, wait in enumerate(waits):
        assert torch.equal(wait().to_dense().double(), dense_sum(every) * (i // 2))


def check_operands_that_are_not_plain():
    """A history, and indices that are a view."""
    values = torch.ones(3, requires_grad=True)
    indices = torch.tensor([[0, 1], [1, 2], [2, 0]]).t()
    mine = torch.sparse_coo_tensor(indices, values * 2, (3, 3))
    result = hvd.sparse_allreduce_async(mine, "history", hvd.Average)()
    assert not result.requires_grad
    assert torch.equal(result.to_dense(), mine.detach().to_dense())


def check_process_sets():
    if hvd.size() == 1:
        return
    members = [0, hvd.size() - 1] if hvd.size() > 2 else [0]
    process_set = hvd.add_process_set(members)
    every = [entries(rank, (5, 2), 1, torch.float32, 4) for rank in range(hvd.size())]
    if process_set.included():
        result = hvd.sparse_allreduce_async(every[hvd.rank()], "set", hvd.Average, process_set)()
        expected = dense_sum([every[rank] for rank in members]) / len(members)
        torch.testing.assert_close(result.to_dense().double(), expected)
    else:
        with pytest.raises(ValueError, match="does not contain|not a member|not in"):
            hvd.sparse_allreduce_async(every[hvd.rank()], "set", hvd.Average, process_set)
    hvd.remove_process_set(process_set)
    with pytest.raises(ValueError, match="not registered"):
        hvd.sparse_allreduce_async(every[hvd.rank()], "set", hvd.Average, process_set)


def check_arguments():
    mine = entries(hvd.rank(), (5, 2), 1, torch.float32, 4)
    for op in (hvd.Min, hvd.Max, hvd.Product, hvd.Adasum, 17):
        with pytest.raises(ValueError):
            hvd.sparse_allreduce_async(mine, "op", op)
    for wrong, text in ((mine.to_dense(), "torch.strided"), (mine.to_dense().to_sparse_csr(), "torch.sparse_csr"),
                        ([1.0], "list"), (mine.bool(), "not supported"), (mine.to(torch.complex64), "not supported")):
        with pytest.raises(ValueError, match=text):
            hvd.sparse_allreduce_async(wrong, "tensor", hvd.Sum)
    with pytest.raises(TypeError):
        hvd.sparse_allreduce_async(mine)
    hvd.barrier()


def check_a_name_in_flight():
    mine = entries(hvd.rank(), (5, 2), 1, torch.float32, 4)
    blocker = hvd.sparse_allreduce_async(mine, "twice", hvd.Sum)
    if hvd.size() > 1:
        if hvd.rank() == 0:  # the others wait, so it is in flight
            big = hvd.sparse_allreduce_async(mine, "late", hvd.Sum)
            with pytest.raises(ValueError, match="late.indices"):
                hvd.sparse_allreduce_async(mine, "late", hvd.Sum)
            hvd.barrier()
        else:
            hvd.barrier()
            big = hvd.sparse_allreduce_async(mine, "late", hvd.Sum)
        big()
    blocker()


@pytest.mark.parametrize("what", ["shape", "dense shape", "sparse dimensions", "dtype", "dimensions"])
def check_disagreement(what):
    if hvd.size() == 1:
        return
    same = entries(0, (6, 4), 1, torch.float32, 3)
    odd = {"shape": entries(0, (7, 4), 1, torch.float32, 3), "dense shape": entries(0, (6, 5), 1, torch.float32, 3),
           "sparse dimensions": entries(0, (6, 4), 2, torch.float32, 3),
           "dtype": entries(0, (6, 4), 1, torch.float64, 3),
           "dimensions": entries(0, (6, 4, 1), 1, torch.float32, 3)}[what]
    for rank in (0, hvd.size() - 1):
        wait = hvd.sparse_allreduce_async(odd if hvd.rank() == rank else same, "differs", hvd.Sum)
        with pytest.raises(hvd.HorovodInternalError, match="'differs'.*ranks disagree on (shape|dtype).*ranks? 0"):
            wait()
        assert hvd.sparse_allreduce_async(same, "differs", hvd.Sum)()._nnz() == 3 * hvd.size()


def check_join():
    for rank in range(hvd.rank() + 1):  # rank 0 has one turn, the last rank most
        present = range(rank, hvd.size())
        every = [entries(rank, (5, 2), 1, torch.float32, 4) for rank in range(hvd.size())]
        result = hvd.sparse_allreduce_async(every[hvd.rank()], "uneven", hvd.Average)()
        expected = dense_sum([every[rank] for rank in present]) / hvd.size()
        torch.testing.assert_close(result.to_dense().double(), expected)
    hvd.join()


# DistributedOptimizer

class Words(torch.nn.Module):
    """Two embeddings and dense layers. The words of a rank and step say which embeddings it uses."""

    def __init__(self, rows=11):
        super().__init__()
        torch.manual_seed(4)
        self.first = torch.nn.Embedding(rows, 4, sparse=True)
        self.second = torch.nn.Embedding(rows, 4, sparse=True)
        self.layer = torch.nn.Linear(4, 4)
        self.last = torch.nn.Linear(4, 2)

    def forward(self, first, second):
        x = torch.zeros(1, 4)
        if len(first):
            x = x + self.first(first).mean(0, keepdim=True)
        if len(second):
            x = x + self.second(second).mean(0, keepdim=True)
        return self.last(torch.tanh(self.layer(x))).square().sum()


def words(rank, step):
    generator = torch.Generator().manual_seed(31 * rank + step)
    return [torch.randint(0, 11, (3 + rank,), generator=generator) for _ in range(2)]


def both(rank, step):
    return words(rank, step)


def uneven(rank, step):
    """The first embedding is unused on rank 0 at first, then on others; the second is used by nobody in step 0."""
    first, second = words(rank, step)
    none = torch.empty(0, dtype=torch.int64)
    return first if (rank + step) % 3 else none, second if step > 0 and (rank + step) % 2 else none


def train(model, optimizer, inputs, steps, passes=1, begin=0, set_to_none=True, closure=False):
    for step in range(begin, begin + steps):
        def backward(step=step):
            optimizer.zero_grad(set_to_none=set_to_none)
            for i in range(passes):
                loss = model(*inputs(hvd.rank(), passes * step + i))
                loss.backward()
            return loss
        if closure:
            optimizer.step(backward)
        else:
            backward()
            optimizer.step()


def train_alone(model, optimizer, inputs, steps, passes=1, begin=0, who=None):
    who = range(hvd.size()) if who is None else who
    for step in range(begin, begin + steps):
        optimizer.zero_grad()
        for rank in who:
            for i in range(passes):
                (model(*inputs(rank, passes * step + i)) / hvd.size()).backward()
        optimizer.step()


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), lr=0.1, **options)


OPTIONS = {
    "default": lambda model: {},
    "named": lambda model: {"named_parameters": model.named_parameters()},
    "as dense": lambda model: {"sparse_as_dense": True},
    "as dense in groups": lambda model: {"sparse_as_dense": True, "groups": 2},
    "one group": lambda model: {"groups": 1},
    "two groups": lambda model: {"groups": 2, "named_parameters": model.named_parameters()},
    "a group of the sparse": lambda model: {"groups": [[model.first.weight, model.second.weight]]},
    "a mixed group": lambda model: {"groups": [[model.first.weight, *model.last.parameters()]]},
    "predivided": lambda model: {"gradient_predivide_factor": 2.0},
    "adasum of one": lambda model: {"op": hvd.Adasum},
}


@pytest.mark.parametrize("inputs", [both, uneven])
@pytest.mark.parametrize("options", OPTIONS)
def check_equals_one_process(options, inputs):
    if options == "adasum of one" and hvd.size() > 1:
        return
    model, reference = Words(), Words()
    train_alone(reference, sgd(reference), inputs, 6)
    optimizer = hvd.DistributedOptimizer(sgd(model), **OPTIONS[options](model))
    train(model, optimizer, inputs, 6)
    expect_equal(model, reference)
    if hvd.size() > 1:
        for embedding in (model.first, model.second):
            assert embedding.weight.grad.is_sparse and embedding.weight.grad.is_coalesced() == ("as dense" in options)


@pytest.mark.parametrize("set_to_none", [True, False], ids=["to none", "to zero"])
@pytest.mark.parametrize("groups, as_dense", [(None, False), (2, False), (2, True)])
@pytest.mark.parametrize("inputs", [both, uneven])
def check_accumulation(inputs, groups, as_dense, set_to_none):
    model, reference = Words(), Words()
    train_alone(reference, sgd(reference), inputs, 4, passes=3)
    optimizer = hvd.DistributedOptimizer(sgd(model), backward_passes_per_step=3, groups=groups,
                                         sparse_as_dense=as_dense)
    # A pass that leaves a parameter out makes no gradient: what is left of the passes is sent by step().
    train(model, optimizer, inputs, 4, passes=3, set_to_none=set_to_none)
    expect_equal(model, reference)


def check_closure():
    model, reference = Words(), Words()
    train_alone(reference, sgd(reference), uneven, 4)
    train(model, hvd.DistributedOptimizer(sgd(model)), uneven, 4, closure=True)
    expect_equal(model, reference)


@pytest.mark.parametrize("compression, as_dense", [("fp16", False), ("bf16", False), ("fp16", True)])
def check_compression(compression, as_dense):
    model, reference = Words(), Words()
    train_alone(reference, sgd(reference), uneven, 4)
    optimizer = hvd.DistributedOptimizer(sgd(model), compression=getattr(hvd.Compression, compression),
                                         sparse_as_dense=as_dense)
    train(model, optimizer, uneven, 4)
    expect_equal(model, reference, rtol=0, atol=5e-3)
    assert hvd.size() == 1 or model.first.weight.grad.dtype == torch.float32


class Doubled(hvd.Compression.none):
    """A user's compressor, which only dense gradients pass through."""

    @staticmethod
    def compress(tensor):
        assert not tensor.is_sparse
        return tensor * 2, None

    @staticmethod
    def decompress(tensor, ctx):
        return tensor / 2


@pytest.mark.parametrize("as_dense", [False, True], ids=["sparse", "as dense"])
def check_compressor_of_the_user(as_dense):
    model, reference = Words(), Words()
    train_alone(reference, sgd(reference), uneven, 4)
    train(model, hvd.DistributedOptimizer(sgd(model), compression=Doubled, sparse_as_dense=as_dense), uneven, 4)
    expect_equal(model, reference)


def check_sum():
    model, reference = Words(), Words()
    train_alone(reference, sgd(reference), uneven, 4)
    train(model, hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1 / hvd.size()), op=hvd.Sum), uneven,
          4)
    expect_equal(model, reference)


@pytest.mark.parametrize("as_dense", [False, True], ids=["sparse", "as dense"])
@pytest.mark.parametrize("inputs", [both, uneven])
def check_sparse_adam(inputs, as_dense):
    model, reference = Words(), Words()

    def optimizers(model, wrap=lambda optimizer: optimizer):
        sparse = [model.first.weight, model.second.weight]
        dense = [*model.layer.parameters(), *model.last.parameters()]
        return wrap(torch.optim.SparseAdam(sparse, lr=0.05)), wrap(torch.optim.SGD(dense, lr=0.1))

    def one_step(optimizers, losses):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for loss in losses:
            loss().backward()
        for p in optimizers[0].param_groups[0]["params"]:
            if p.grad is None and optimizers is plain and hvd.size() > 1:  # counts as zeros, but in a process alone
                p.grad = torch.sparse_coo_tensor(torch.empty(1, 0), torch.empty(0, 4), p.shape)
        for optimizer in optimizers:
            optimizer.step()

    plain = optimizers(reference)
    names = {p: name for name, p in model.named_parameters()}
    mine = optimizers(model, lambda optimizer: hvd.DistributedOptimizer(
        optimizer, [(names[p], p) for p in optimizer.param_groups[0]["params"]], sparse_as_dense=as_dense))
    for step in range(5):
        one_step(plain, [lambda rank=rank: reference(*inputs(rank, step)) / hvd.size() for rank in range(hvd.size())])
        one_step(mine, [lambda: model(*inputs(hvd.rank(), step))])
    expect_equal(model, reference)


@pytest.mark.parametrize("as_dense", [False, True], ids=["sparse", "as dense"])
def check_entries_of_zeros_stay_entries(as_dense):
    """SparseAdam moves a row whose gradient is zero, by its momentum, and not one without gradient."""
    def weight():
        return torch.nn.Parameter(torch.arange(6.0).reshape(3, 2))

    def gradient(rank, step):
        return torch.sparse_coo_tensor([[2 if rank else 0]], torch.full((1, 2), float(step == 0)), (3, 2))

    mine, alone = weight(), weight()
    optimizer = hvd.DistributedOptimizer(torch.optim.SparseAdam([mine]), [("weight", mine)], sparse_as_dense=as_dense)
    plain = torch.optim.SparseAdam([alone])
    for step in range(3):
        before = mine.detach().clone()
        mine.grad = gradient(hvd.rank(), step)
        optimizer.step()
        alone.grad = functools.reduce(torch.add, [gradient(rank, step) for rank in range(hvd.size())]) / hvd.size()
        plain.step()
        torch.testing.assert_close(mine, alone)
        assert (mine != before).any(1).tolist() == [True, False, hvd.size() > 1]


def check_nobody_has_a_gradient_for_a_while():
    """Not even an empty one: it counts as zeros, and may become sparse any time later."""
    model = Words()
    optimizer = hvd.DistributedOptimizer(sgd(model))
    none = torch.empty(0, dtype=torch.int64)
    before = model.second.weight.detach().clone()
    for step in range(4):
        optimizer.zero_grad()
        model(torch.tensor([step]), torch.tensor([hvd.rank()]) if step == 3 else none).backward()
        optimizer.step()
        assert step == 3 or torch.equal(model.second.weight, before)
    if hvd.size() > 1:
        assert model.second.weight.grad._indices().tolist() == [list(range(hvd.size()))]
    assert (model.second.weight != before).any(1).nonzero().flatten().tolist() == list(range(hvd.size()))


class Tied(torch.nn.Module):
    """Its weight has a sparse gradient, or a dense one where it is the output layer too."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.embedding = torch.nn.Embedding(6, 3, sparse=True)

    def forward(self, word, dense):
        x = self.embedding(torch.tensor([word]))
        return (x @ self.embedding.weight.t()).square().sum() if dense else x.square().sum()


@pytest.mark.parametrize("dense", [  # whether the gradient is dense, of a rank and step
    lambda rank, step: rank == 0, lambda rank, step: (rank + step) % 2 == 1,
    lambda rank, step: step > 0 and rank == 0, lambda rank, step: step == 0], ids=["one", "in turn", "late", "early"])
@pytest.mark.parametrize("as_dense", [False, True], ids=["sparse", "as dense"])
def check_sparse_on_some_ranks_and_dense_on_others(dense, as_dense):
    model, reference = Tied(), Tied()
    optimizer, plain = hvd.DistributedOptimizer(sgd(model), sparse_as_dense=as_dense), sgd(reference)
    for step in range(4):
        optimizer.zero_grad()
        model((hvd.rank() + step) % 6, dense(hvd.rank(), step)).backward()
        optimizer.step()
        plain.zero_grad()
        for rank in range(hvd.size()):
            (reference((rank + step) % 6, dense(rank, step)) / hvd.size()).backward()
        plain.step()
    expect_equal(model, reference)
    layouts = hvd.allgather_object(str(model.embedding.weight.grad.layout))
    assert hvd.size() == 1 or len(set(layouts)) == 1


def check_process_set():
    if hvd.size() == 1:
        return
    members = [0, hvd.size() - 1] if hvd.size() > 2 else [0]
    process_set = hvd.add_process_set(members)
    model, reference = Words(), Words()
    optimizer, plain = hvd.DistributedOptimizer(sgd(model), process_set=process_set), sgd(reference)
    who = members if process_set.included() else [hvd.rank()]
    for step in range(4):
        optimizer.zero_grad()
        model(*uneven(hvd.rank(), step)).backward()
        optimizer.step()
        plain.zero_grad()
        for rank in who:
            (reference(*uneven(rank, step)) / len(who)).backward()
        plain.step()
    for p, q in zip(model.parameters(), reference.parameters()):
        torch.testing.assert_close(p, q)
    hvd.remove_process_set(process_set)


@pytest.mark.parametrize("groups, as_dense", [(None, False), (1, False), (1, True)])
@pytest.mark.parametrize("first", ["first rank", "last rank"])
def check_join_on_uneven_data(first, groups, as_dense):
    """A rank with no data at first does not know what the others have settled meanwhile."""
    model, reference = Words(), Words()
    optimizer = hvd.DistributedOptimizer(sgd(model), groups=groups, sparse_as_dense=as_dense)
    plain = sgd(reference)
    done = 0
    for epoch in range(3):
        empty = 0 if first == "first rank" else hvd.size() - 1
        steps = {rank: 0 if rank == empty and epoch != 1 else 1 + epoch + rank for rank in range(hvd.size())}
        if hvd.size() == 1:
            steps = {0: 2}
        train(model, optimizer, uneven, steps[hvd.rank()], begin=done)
        hvd.join()
        for step in range(max(steps.values())):
            train_alone(reference, plain, uneven, 1, begin=done + step,
                        who=[rank for rank in steps if steps[rank] > step])
        # Those that have joined have missed the others' last steps.
        hvd.broadcast_parameters(model.state_dict(), max(steps, key=lambda rank: steps[rank]))
        done += max(steps.values())
        expect_equal(model, reference)


def check_clipping_and_skip_synchronize():
    model, reference = Words(), Words()
    optimizer, plain = hvd.DistributedOptimizer(sgd(model)), sgd(reference)
    for step in range(3):
        for m, o, inputs in ((model, optimizer, [both(hvd.rank(), step)]),
                             (reference, plain, [both(rank, step) for rank in range(hvd.size())])):
            o.zero_grad()
            for values in inputs:
                (m(*values) / len(inputs)).backward()
            if o is optimizer:
                optimizer.synchronize()
            for p in m.parameters():
                p.grad = p.grad.coalesce() * 0.5 if p.grad.is_sparse else p.grad * 0.5
            if o is optimizer:
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                plain.step()
    expect_equal(model, reference)
    model(*both(hvd.rank(), 0)).backward()
    if hvd.size() > 1:
        with pytest.raises(AssertionError, match="zero_grad"):
            optimizer.zero_grad()
    optimizer.step()


def check_create_graph():
    model, reference = Words(), Words()
    optimizer, plain = hvd.DistributedOptimizer(sgd(model)), sgd(reference)
    train_alone(reference, plain, both, 2)
    for step in range(2):
        optimizer.zero_grad()
        model.layer(model.first(both(hvd.rank(), step)[0])).sum().backward(create_graph=True)
        optimizer.synchronize()
        optimizer.zero_grad()
        model(*both(hvd.rank(), step)).backward()
        optimizer.step()
    expect_equal(model, reference)


@pytest.mark.parametrize("as_dense", [False, True], ids=["sparse", "as dense"])
def check_the_epoch_ends(as_dense):
    """Settled forms and slots end with it; the optimizer goes on."""
    model, reference = Words(), Words()
    optimizer, plain = hvd.DistributedOptimizer(sgd(model), groups=1, sparse_as_dense=as_dense), sgd(reference)
    for epoch in range(2):
        train(model, optimizer, uneven, 3, begin=3 * epoch)
        train_alone(reference, plain, uneven, 3, begin=3 * epoch)
        expect_equal(model, reference)
        hvd.shutdown()
        hvd.init()


def check_shutdown_in_flight():
    model = Words()
    optimizer = hvd.DistributedOptimizer(sgd(model))
    train(model, optimizer, both, 2)
    model(*both(hvd.rank(), 2)).backward()
    hvd.barrier()
    hvd.shutdown()
    hvd.init()
    wait = hvd.sparse_allreduce_async(entries(0, (5, 2), 1, torch.float32, 4), "lost", hvd.Sum)
    hvd.barrier()
    hvd.shutdown()
    with pytest.raises(hvd.HorovodInternalError, match="'lost'.*shut down"):
        wait()
    hvd.init()
    if hvd.size() > 1:
        with pytest.raises(hvd.HorovodInternalError, match="shut down|ended"):
            optimizer.step()
    optimizer.zero_grad()
    train(model, optimizer, both, 2)
    hvd.barrier()


def check_other_ops_are_refused_on_all_ranks():
    if hvd.size() == 1:
        return
    model = Words()
    optimizer = hvd.DistributedOptimizer(sgd(model), op=hvd.Max)
    model(*(both if hvd.rank() == 0 else uneven)(hvd.rank(), 0)).backward()
    with pytest.raises(ValueError, match="sparse_as_dense"):
        optimizer.step()
    hvd.barrier()


def check_other_ops_with_sparse_as_dense():
    if hvd.size() == 1:
        return
    model = torch.nn.Embedding(6, 2, sparse=True)
    torch.nn.init.zeros_(model.weight)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), op=hvd.Max, sparse_as_dense=True)
    (model(torch.tensor([0, 1 + hvd.rank()])).sum() * (1 + hvd.rank())).backward()
    optimizer.step()
    assert model.weight.grad.is_sparse
    expected = [hvd.size(), *range(1, hvd.size() + 1), 0, 0, 0, 0][:6]  # row 0 is of all ranks
    assert (-model.weight[:, 0]).tolist() == expected


def check_disagreement_on_the_shape():
    if hvd.size() == 1:
        return
    model = torch.nn.Embedding(5 + (hvd.rank() == 0), 2, sparse=True)
    optimizer = hvd.DistributedOptimizer(sgd(model), [("embedding", model.weight)])
    for _ in range(2):
        model(torch.tensor([1])).sum().backward()
        with pytest.raises(hvd.HorovodInternalError, match=re.escape("'embedding'") + ".*disagree on shape"):
            optimizer.step()


def check_different_parameters():
    if hvd.size() == 1:
        return
    parameters = [torch.ones(1, requires_grad=True) for _ in range(2 + (hvd.rank() == 0))]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1))
    with pytest.raises(hvd.HorovodInternalError, match="different parameters.*disagree on shape"):
        optimizer.step()
    hvd.barrier()


def check_a_large_embedding_needs_no_dense_memory():
    rows = (1 << 24) // hvd.size()
    model = torch.nn.Sequential(torch.nn.Embedding(rows, 8, sparse=True), torch.nn.Linear(8, 1))
    optimizer = hvd.DistributedOptimizer(sgd(model))
    for step in range(2):
        optimizer.zero_grad()
        model(torch.tensor([step, rows - 1])).sum().backward()
        optimizer.step()
    if hvd.size() > 1:
        assert model[0].weight.grad._nnz() == 2 * hvd.size()
        assert all(g.slot is None for g in optimizer._gradients.values() if g.parameter is model[0].weight)


@pytest.mark.parametrize("columns", [1, 2])
@pytest.mark.parametrize("as_dense", [False, True])
def check_a_gradient_of_one_row(as_dense, columns):
    """sum() of one row: its gradient is a single number without a stride."""
    if hvd.size() == 1:
        pytest.skip("the optimizer is PyTorch's own, whose SGD takes such a gradient for zero")
    table = torch.nn.Embedding(4, columns, sparse=True)
    torch.nn.init.zeros_(table.weight)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=1.0), op=hvd.Sum,
                                         sparse_as_dense=as_dense)
    for _ in range(2):
        optimizer.zero_grad()
        (-table(torch.tensor([2])).sum()).backward()
        optimizer.step()
    assert table.weight.tolist() == [[0.0] * columns] * 2 + [[2.0 * hvd.size()] * columns] + [[0.0] * columns]


def check_pytorch_warns_of_nothing(monkeypatch):
    """From 2.11 on it warns, once, where it is not told whether to check the indices of a sparse tensor. In 2.11 and
    2.12 the argument that tells it came too late, as here."""
    make = torch.sparse_coo_tensor
    monkeypatch.setattr(torch, "sparse_coo_tensor", lambda *args, check_invariants=None, **options:
                        make(*args, **options))
    tell = torch._C._set_check_sparse_tensor_invariants
    forms = {"a sum": lambda: hvd.sparse_allreduce_async(rows, "quiet", hvd.Average)(),
             "no gradient": lambda: sparse.in_form(None, 1, torch.ones(3, 2)),
             "other values": lambda: sparse.with_values(rows, rows._values()),
             "places": lambda: sparse.at_places(torch.ones(3), torch.ones(3), torch.float32),
             "state": lambda: hvd.broadcast_optimizer_state(
                 torch.optim.SparseAdam(torch.nn.Embedding(3, 2, sparse=True).parameters()), 0)}
    rows = torch.ones(3, 4).to_sparse(1)
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        for name, form in forms.items():
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                with contextlib.suppress(TypeError):  # of a PyTorch before 2.11, which warns of nothing
                    tell(None)
                form()
            assert not [w for w in seen if "invariant" in str(w.message)], name
    finally:
        torch.set_warn_always(always)
        tell(False)
