"""What programs read of a DistributedOptimizer: its arguments, and the gradients on their way."""
import pytest
import torch

import lightcc.torch as hvd
import ranks
from training import expect_equal, make_model, my_loss, pair, train, train_alone

pytestmark = pytest.mark.usefixtures("job")


@pytest.mark.parametrize("np", (1, 2))
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


def optimizer_of(model, **options):
    return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
                                    model.named_parameters(), **options)


def on_their_way(model, optimizer):
    """The parameters for which _handles has a handle."""
    found = {p for p, (handle, _) in optimizer._handles.items() if handle is not None}
    return [p in found for p in model.parameters()]


def check_arguments():
    model = make_model()
    optimizer = optimizer_of(model)
    assert (optimizer.backward_passes_per_step, optimizer.gradient_predivide_factor) == (1, 1.0)
    assert optimizer.op == hvd.Average
    assert optimizer.process_set is hvd.global_process_set and not optimizer.sparse_as_dense
    assert optimizer._compression is hvd.Compression.none
    optimizer = optimizer_of(model, backward_passes_per_step=3, compression=hvd.Compression.fp16, sparse_as_dense=True,
                             gradient_predivide_factor=2.0)
    assert (optimizer.backward_passes_per_step, optimizer.gradient_predivide_factor) == (3, 2.0)
    assert optimizer._compression is hvd.Compression.fp16 and optimizer.sparse_as_dense
    assert optimizer_of(model, op=hvd.Adasum).op == hvd.Adasum
    with pytest.raises(AttributeError):
        optimizer.op = hvd.Sum  # it would have no effect
    with pytest.raises(ValueError, match="must be > 0"):
        optimizer.backward_passes_per_step = 0
    assert optimizer.backward_passes_per_step == 3


def check_process_set():
    if hvd.size() == 1:
        return
    process_set = hvd.add_process_set([0])
    model = make_model()
    optimizer = optimizer_of(model, process_set=process_set)
    assert optimizer.process_set is process_set
    taking_part = set(model.parameters()) if process_set.included() else set()
    assert optimizer._requires_update == taking_part
    my_loss(model, 0).backward()
    assert set(optimizer._handles) == taking_part
    optimizer.step()
    hvd.remove_process_set(process_set)


def check_setting_the_passes_is_calling_the_method():
    model, optimizer, reference, plain = pair()
    train(model, optimizer, 2)
    train_alone(reference, plain, 2)
    optimizer.backward_passes_per_step = 2
    assert optimizer.backward_passes_per_step == 2 and set(optimizer._allreduce_delay.values()) == {2}
    train(model, optimizer, 3, passes=2)
    train_alone(reference, plain, 3, passes=2)
    expect_equal(model, reference)
    my_loss(model, 0).backward()
    my_loss(model, 1).backward()
    if hvd.size() > 1:
        optimizer.backward_passes_per_step = 3  # what is on its way stays so
        with pytest.raises(AssertionError, match="more than backward_passes_per_step"):
            my_loss(model, 2).backward()
    optimizer.synchronize()
    assert set(optimizer._allreduce_delay.values()) == {optimizer.backward_passes_per_step}


def check_requires_update():
    model = make_model()
    model[0].weight.requires_grad_(False)
    optimizer = optimizer_of(model)
    expected = set(model.parameters()) - {model[0].weight} if hvd.size() > 1 else set()
    assert optimizer._requires_update == expected
    optimizer.register_local_var(model[2].weight)
    assert optimizer._requires_update == expected - {model[2].weight}


def check_delay_counts_down():
    model = make_model()
    optimizer = optimizer_of(model, backward_passes_per_step=2)
    assert list(optimizer._allreduce_delay) == list(model.parameters())
    assert [optimizer._allreduce_delay[p] for p in model.parameters()] == [2] * 6
    my_loss(model, 0).backward()
    assert set(optimizer._allreduce_delay.values()) == ({1} if hvd.size() > 1 else {2})
    for p in optimizer._allreduce_delay:
        optimizer._allreduce_delay[p] = 2
    my_loss(model, 1).backward()
    assert on_their_way(model, optimizer) == [False] * 6
    my_loss(model, 1).backward()
    assert on_their_way(model, optimizer) == [hvd.size() > 1] * 6
    optimizer.step()
    with pytest.raises(KeyError):
        optimizer._allreduce_delay[torch.ones(1)]


@pytest.mark.parametrize("compression", ["none", "fp16"])
@pytest.mark.parametrize("groups", [None, 2])
def check_handles_are_what_is_on_its_way(groups, compression):
    model = make_model()
    compression = getattr(hvd.Compression, compression)
    optimizer = optimizer_of(model, groups=groups, compression=compression)
    for step in range(2):
        assert optimizer._handles == {}
        my_loss(model, step).backward()
        if hvd.size() == 1:
            assert optimizer._handles == {}
            continue
        handles = optimizer._handles
        assert set(handles) == set(model.parameters()) and handles == optimizer._handles
        assert len({handle for handle, _ in handles.values()}) == (groups or 6)
        assert {ctx for _, ctx in handles.values()} == ({None} if compression is hvd.Compression.none
                                                        else {torch.float32})
        assert all(hvd.poll(handle) in (True, False) for handle, _ in handles.values())
        if step == 1:  # the program waits for one itself
            weight, (handle, ctx) = next(iter(handles.items()))
            result = hvd.synchronize(handle)
            if groups is None:
                assert compression.decompress(result, ctx).dtype == torch.float32 and result.shape == weight.shape
            with pytest.raises(ValueError, match="handle"):
                hvd.poll(handle)
        optimizer.synchronize()
        assert optimizer._handles == {}
        for p in model.parameters():
            expected = hvd.allgather(p.grad.reshape(1, -1))
            assert (expected == expected[0]).all()
            if step == 1 and groups is None and p is weight:
                assert torch.equal(compression.decompress(result, ctx), p.grad)
        with optimizer.skip_synchronize():
            optimizer.step()


def check_handles_of_gradients_that_wait():
    """For more backward passes, or for the rest of their group."""
    if hvd.size() == 1:
        return
    model = make_model()
    optimizer = optimizer_of(model, backward_passes_per_step=2)
    my_loss(model, 0).backward()
    assert optimizer._handles == {p: (None, None) for p in model.parameters()}
    optimizer.step()
    first, second = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([first, second], lr=0.1), groups=1)
    first.sum().backward()
    assert optimizer._handles == {first: (None, None)}
    optimizer.step()
    assert optimizer._handles == {}


@pytest.mark.parametrize("as_dense", [False, True], ids=["sparse", "as dense"])
def check_handles_of_sparse_gradients(as_dense):
    if hvd.size() == 1:
        return
    model = torch.nn.Embedding(4, 2, sparse=True)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), sparse_as_dense=as_dense)
    for step in range(2):  # in the first one the ranks do not know before synchronize that it is sparse
        optimizer.zero_grad()
        model(torch.tensor([hvd.rank()])).sum().backward()
        if step == 1 or as_dense:
            (handle, ctx), = optimizer._handles.values()
            result = hvd.synchronize(handle) if as_dense else handle()
            assert ctx is None and torch.equal(result.to_dense()[:hvd.size()], torch.full((hvd.size(), 2),
                                                                                         1 / hvd.size()))
        else:
            assert optimizer._handles == {model.weight: (None, None)}
        optimizer.step()
        assert torch.equal(model.weight.grad.to_dense()[:hvd.size()], torch.full((hvd.size(), 2), 1 / hvd.size()))


def check_sending_one_gradient():
    model = make_model()
    optimizer = optimizer_of(model, backward_passes_per_step=2)
    my_loss(model, 0).backward()
    weight = model[0].weight
    mine = weight.grad.clone()
    expected = hvd.allreduce(mine)
    handle, ctx = optimizer._allreduce_grad_async(weight)
    assert ctx is None
    if hvd.size() > 1:
        assert optimizer._handles[weight] == (handle, None)
        assert on_their_way(model, optimizer) == [p is weight for p in model.parameters()]
        with pytest.raises(ValueError, match="0.weight is on its way"):
            optimizer._allreduce_grad_async(weight)
        with pytest.raises(ValueError, match="not exchanged"):
            optimizer._allreduce_grad_async(torch.ones(1))
    torch.testing.assert_close(hvd.synchronize(handle), expected)
    optimizer.synchronize()
    torch.testing.assert_close(weight.grad, expected)
    with pytest.raises(ValueError, match="Adasum"):
        optimizer_of(model, op=hvd.Adasum)._allreduce_grad_async(weight)


def check_an_error_that_the_program_has_seen():
    """Gradients that are not reduced do not pass for reduced ones."""
    if hvd.size() == 1:
        return
    weight = torch.ones(2 + hvd.rank(), requires_grad=True)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1), [("weight", weight)])
    weight.sum().backward()
    (handle, _), = optimizer._handles.values()
    with pytest.raises(hvd.HorovodInternalError, match="disagree"):
        hvd.synchronize(handle)
    with pytest.raises(hvd.HorovodInternalError, match=r"synchronize\(handle\) has raised"):
        optimizer.step()
    assert optimizer._handles == {}


def check_handles_that_outlive_the_optimizer_or_the_epoch():
    if hvd.size() == 1:
        return
    model = make_model()
    optimizer = optimizer_of(model)
    my_loss(model, 0).backward()
    handles = list(optimizer._handles.values())
    hvd.synchronize(handles[0][0])
    del optimizer
    model = make_model()
    optimizer = optimizer_of(model)
    my_loss(model, 0).backward()
    assert len(optimizer._handles) == 6
    hvd.barrier()
    hvd.shutdown()
    hvd.init()
    assert optimizer._handles == {}
    with pytest.raises(hvd.HorovodInternalError, match="shut down"):
        optimizer.step()
    train(model, optimizer, 1)
