"""Compression.topk, int8 and int4 under DistributedOptimizer: nothing is lost, all ranks get the same, whoever takes
part."""
import gc
import re

import pytest
import torch
from compressed import COMPRESSED, SHAPES, Training, begin, end, gradient

import lightcc.torch as hvd
import ranks
from lightcc.compress.residuals import KEY
from lightcc.core import lib

COMPRESSIONS = {"topk": hvd.Compression.topk(0.01), "fp16": hvd.Compression.topk(0.05, fp16=True),
                "warmup": hvd.Compression.topk(0.01, warmup_steps=5), "int8": hvd.Compression.int8(),
                "int4": hvd.Compression.int4()}
pytestmark = [pytest.mark.torch_sizes, pytest.mark.usefixtures("job")]


@pytest.mark.parametrize("np", (3, 4))
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


@pytest.fixture(params=(1, 2), autouse=True)
def intra(request, job):
    begin(request.param)
    yield request.param
    end()
    hvd.init()


@pytest.mark.parametrize("kind", COMPRESSIONS)
@pytest.mark.parametrize("groups", (None, 2))
def check_nothing_is_lost(kind, groups):
    training = Training(COMPRESSIONS[kind], groups=groups)
    for _ in range(8):
        training.step().expect_equal_bits()
    training.expect_total(tolerance=1e-3 if kind in ("int8", "int4") else 0)
    left = training.left()
    assert all(left[name].count_nonzero() > 100 for name in COMPRESSED)
    assert not any(left[name].any() for name in SHAPES if name not in COMPRESSED)


def owns_something(training):
    """Nodes of other sizes have as many shards of a tensor as the smallest has members: some ranks own none."""
    return any(tensor["pieces"] for tensor in training.optimizer.state_dict()[KEY]["tensors"].values())


def check_what_is_sent():
    training = Training(hvd.Compression.topk(0.01)).steps(4)
    stats = hvd.compression_stats(training.optimizer)
    assert stats["gradient_bytes"] == 4 * 4 * sum(training.parameters[name].numel() for name in COMPRESSED)
    assert stats["dense"] == ""
    if owns_something(training):
        assert 0.01 <= stats["density"] < 0.02 and stats["residual_norm"] > 1
        assert 0 < stats["sent_bytes"] < 0.1 * stats["dense_sent_bytes"]
        assert stats["ratio"] == stats["sent_bytes"] / stats["dense_sent_bytes"]
    else:
        assert (stats["sent_bytes"], stats["ratio"], stats["density"], stats["residual_norm"]) == (0, 1, 1, 0)
    assert hvd.compression_stats()["sent_bytes"] >= stats["sent_bytes"]


def check_two_runs_are_equal_with_and_without_fusion(intra):
    runs = []
    for fusion in "101":
        begin(intra, LIGHTCC_FUSION=fusion)
        training = Training(hvd.Compression.topk(0.01))
        runs.append([training.step().grads().clone() for _ in range(4)])
    assert all(torch.equal(one, other) for run in runs[1:] for one, other in zip(run, runs[0]))


def check_averages_in_units_of_the_sum():
    for factor in (1.0, 4.0):
        training = Training(hvd.Compression.topk(0.02), op=hvd.Average, gradient_predivide_factor=factor).steps(3)
        saved = hvd.gather_residuals(training.optimizer)
        for name, left in training.left(saved).items():
            torch.testing.assert_close(training.delivered[name] * hvd.size() + left * factor, training.dense[name],
                                       rtol=1e-5, atol=1e-4)


def check_several_backward_passes():
    training = Training(hvd.Compression.topk(0.01), backward_passes_per_step=2)
    for _ in range(3):
        training.backward()
        training.optimizer.zero_grad = lambda: None  # a second pass, on top of the first
        training.step()
        del training.optimizer.zero_grad
        for name, dense in training.dense.items():  # both passes had the same gradients
            dense += sum(gradient(name, training.step_number - 1, rank) for rank in training.ranks)
    training.expect_total()


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
def check_16_bit_gradients(dtype):
    training = Training(hvd.Compression.topk(0.05), dtype=dtype, names=COMPRESSED).steps(4)
    training.expect_equal_bits()
    training.expect_total(tolerance=0.02)
    assert hvd.compression_stats(training.optimizer)["gradient_bytes"] == 2 * 4 * training.grads().numel()


def check_float64_travels_dense():
    training = Training(hvd.Compression.topk(0.01), dtype=torch.float64).steps(2)
    assert all(torch.equal(training.delivered[name], training.dense[name]) for name in SHAPES)
    why = hvd.compression_stats(training.optimizer)["dense"]
    assert why.startswith("no gradient is of the kind that is compressed: ") and " is of dtype float64" in why


def check_it_is_said_why_one_dimension_travels_dense():
    training = Training(hvd.Compression.topk(0.01), names=[name for name in SHAPES if len(SHAPES[name]) == 1]).steps(1)
    why = hvd.compression_stats(training.optimizer)["dense"]
    assert re.fullmatch(r"no gradient is of the kind that is compressed: .* has fewer than two dimensions.*", why), why
    assert why in hvd.compression_stats()["dense"]
    compression = hvd.Compression.topk(0.01)
    hvd.allreduce(torch.ones(1 << 16), name="flat", compression=compression)
    assert "flat has fewer than two dimensions" in hvd.compression_stats()["dense"]
    hvd.allreduce(torch.ones(256, 256), name="flat", compression=compression)
    assert "flat has fewer" not in hvd.compression_stats()["dense"]


def check_a_model_that_becomes_another():
    training = Training(hvd.Compression.topk(0.01)).steps(2)
    for p in training.parameters.values():
        p.data = p.data.double()
    before = {name: total.clone() for name, total in training.delivered.items()}
    training.step()
    for name in SHAPES:
        exact = sum(gradient(name, training.step_number - 1, rank) for rank in training.ranks)
        assert torch.equal(training.delivered[name] - before[name], exact.double())


def check_loss_scales():
    compression = hvd.Compression.topk(0.01)
    scale = [1024.0]
    compression.loss_scale = lambda: scale[0]
    training = Training(compression)
    for scale[0] in (1024.0, 1024.0, 65536.0, 512.0, 1.0):
        training.step(scale=scale[0])
    training.expect_total()


def check_nan_reaches_everyone_and_stays_nowhere():
    def broken(name, values):
        if hvd.rank() == 1 and name == "a.weight":
            values[3, 5] = float("nan")
        return values

    training = Training(hvd.Compression.topk(0.01)).steps(2)
    training.backward(edit=broken)
    training.optimizer.synchronize()
    assert not training.parameters["a.weight"].grad.isfinite().all()
    assert training.parameters["b.weight"].grad.isfinite().all()
    training.step_number += 1
    for _ in range(3):
        training.step().expect_equal_bits()
        assert training.grads().isfinite().all()
    assert all(left.isfinite().all() for left in training.left().values())


def check_ranks_that_disagree():
    training = Training(hvd.Compression.topk(0.01 if hvd.rank() == 0 else 0.02), names=("a.weight",))
    training.backward()
    with pytest.raises(hvd.HorovodInternalError, match="a.weight"):
        training.optimizer.synchronize()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum) == hvd.size()


def check_a_gradient_that_its_user_wants_dense():
    compression = hvd.Compression.topk(0.01, dense=lambda name, tensor: name == "b.weight" and tensor.dim() == 2)
    training = Training(compression).steps(2)
    assert torch.equal(training.delivered["b.weight"], training.dense["b.weight"])
    assert not torch.equal(training.delivered["a.weight"], training.dense["a.weight"])
    training.expect_total()


def check_a_group_is_cut_in_two():
    training = Training(hvd.Compression.topk(0.01), groups=1).steps(2)
    groups = {gradient.group.given_name: {m.given_name for m in gradient.group.members}
              for gradient in training.optimizer._gradients.values()}
    assert groups == {"gradient_group.0": set(SHAPES) - set(COMPRESSED), "gradient_group.0.compressed": set(COMPRESSED)}


def check_a_rank_that_has_joined():
    """It adds nothing, and what it has left behind stays there."""
    last = hvd.size() - 1
    training = Training(hvd.Compression.topk(0.01)).steps(2)
    if hvd.rank() != last:
        for _ in range(3):
            training.step(present=range(last))
    hvd.join()
    training.step_number = 5
    training.delivered = hvd.broadcast_object(training.delivered, 0)
    training.dense = hvd.broadcast_object(training.dense, 0)
    training.step()
    training.expect_equal_bits()
    training.expect_total()


def check_a_process_set(intra):
    members = hvd.add_process_set(range(1, hvd.size()))
    if members.included():
        training = Training(hvd.Compression.topk(0.01), process_set=members).steps(4)
        training.expect_total()
        stats = hvd.compression_stats(training.optimizer)
        assert (stats["dense"] == "") == (members.size() > intra), "nodes are made of the members of the set"
    hvd.barrier()


def check_a_local_parameter():
    training = Training(hvd.Compression.topk(0.01))
    training.optimizer.register_local_var(training.parameters["a.weight"])
    training.backward()
    training.optimizer.synchronize()
    mine = gradient("a.weight", 0, hvd.rank()) / hvd.size()
    torch.testing.assert_close(training.parameters["a.weight"].grad, mine)


@pytest.mark.parametrize("as_dense", (False, True))
def check_sparse_gradients_travel_dense(as_dense):
    table = torch.nn.Embedding(500, 16, sparse=True)
    weight = torch.nn.Parameter(torch.zeros(64, 80))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([table.weight, weight], lr=1.0), [("table.weight", table.weight), ("weight", weight)],
        compression=hvd.Compression.topk(0.01), op=hvd.Sum, sparse_as_dense=as_dense)
    for step in range(3):
        optimizer.zero_grad()
        rows = torch.tensor([step, 7, 100 + hvd.rank()])
        (table(rows).sum() + (weight * (1 + torch.arange(80.0))).sum()).backward()
        optimizer.synchronize()
        expected = torch.zeros(500)
        for rank in range(hvd.size()):
            expected.index_add_(0, torch.tensor([step, 7, 100 + rank]), torch.ones(3))
        assert table.weight.grad.is_sparse
        assert torch.equal(table.weight.grad.to_dense()[:, 0], expected)
    assert hvd.compression_stats(optimizer)["gradient_bytes"] == 4 * weight.numel() * (2 if as_dense else 3)


def check_an_optimizer_that_is_gone_leaves_nothing_behind():
    training = Training(hvd.Compression.topk(0.01)).steps(1)
    codec = training.optimizer._reducer.compressed._codec.id
    assert lib.codec_state(codec)
    del training
    gc.collect()
    with pytest.raises(ValueError):
        lib.codec_state(codec)


def check_one_node_sends_dense():
    begin(0)
    training = Training(hvd.Compression.topk(0.01)).steps(2)
    if hvd.local_size() == hvd.size():
        assert all(torch.equal(training.delivered[name], training.dense[name]) for name in SHAPES)
        stats = hvd.compression_stats(training.optimizer)
        assert stats["dense"] and stats["residual_norm"] == 0 and stats["ratio"] == 1


def check_few_bytes_travel_dense(intra):
    begin(intra, LIGHT_TOPK_THRESHOLD=str(1 << 20))
    training = Training(hvd.Compression.topk(0.01)).steps(2)
    assert all(torch.equal(training.delivered[name], training.dense[name]) for name in SHAPES)
    assert "LIGHT_TOPK_THRESHOLD=1048576" in hvd.compression_stats(training.optimizer)["dense"]


def check_the_switch_is_for_optimizers(intra):
    begin(intra, LIGHT_TOPK_ALLREDUCE="1", LIGHT_TOPK_RATIO="0.05", LIGHT_TOPK_FP16="1")
    training = Training(hvd.Compression.none).steps(3)
    assert training.optimizer._compression == hvd.Compression.topk(0.05, fp16=True)
    assert not owns_something(training) or 0.05 <= hvd.compression_stats(training.optimizer)["density"] < 0.06
    training.expect_total()
    assert Training(hvd.Compression.fp16).optimizer._compression is hvd.Compression.fp16
    for op in (hvd.Adasum, hvd.Max):
        assert Training(hvd.Compression.none, op=op).optimizer._compression is hvd.Compression.none
    values = torch.arange(5120.0).view(64, 80)
    assert torch.equal(hvd.allreduce(values, name="plain", op=hvd.Sum), values * hvd.size())


def check_allreduces_of_one_compressor_feed_back():
    compression = hvd.Compression.topk(0.1)
    values = gradient("a.weight", 0, hvd.rank())
    exact = sum(gradient("a.weight", 0, rank) for rank in range(hvd.size()))
    seen = [hvd.allreduce(values, name="one", op=hvd.Sum, compression=compression) for _ in range(40)]
    assert all(0 < one.count_nonzero() < exact.numel() / 2 for one in seen)
    error = [(sum(seen[:n]) / n - exact).norm() / exact.norm() for n in (1, 10, 40)]
    assert error[1] < 0.7 * error[0] and error[2] < 0.7 * error[1], "the mean tends to the dense sum"
    both = hvd.grouped_allreduce([values, 2 * values], name="two", op=hvd.Sum, compression=compression)
    assert all(0 < one.count_nonzero() < exact.numel() / 2 for one in both)
    mixed = hvd.grouped_allreduce([values, torch.ones(3)], name="mixed", op=hvd.Sum, compression=compression)
    assert torch.equal(mixed[0], exact) and torch.equal(mixed[1], torch.full((3,), float(hvd.size())))
    tensor = values.clone().requires_grad_()
    hvd.allreduce(tensor, name="three", op=hvd.Sum, compression=compression).sum().backward()
    assert torch.equal(tensor.grad, torch.full_like(values, hvd.size()))
