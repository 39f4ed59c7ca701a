"""hvd.Compression and a user's own compressors: on tensors, in collectives, under DistributedOptimizer."""
import pytest
import torch

import lightcc.torch as hvd
import ranks
from lightcc.torch.compression import Compressor, FP16Compressor, NoneCompressor
from training import expect_equal, make_model, my_loss, sgd, train_alone

pytestmark = pytest.mark.usefixtures("job")


@pytest.mark.parametrize("np", (1, 3))
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


def check_compressors():
    assert hvd.Compression.none is NoneCompressor and hvd.Compression.fp16 is FP16Compressor
    assert issubclass(NoneCompressor, Compressor) and issubclass(FP16Compressor, Compressor)
    with pytest.raises(NotImplementedError):
        Compressor.compress(torch.ones(1))
    with pytest.raises(NotImplementedError):
        Compressor.decompress(torch.ones(1), None)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        tensor = torch.arange(6.0).view(2, 3).to(dtype)
        for name, wire in (("none", dtype), ("fp16", torch.float16), ("bf16", torch.bfloat16)):
            compressor = getattr(hvd.Compression, name)
            sent, context = compressor.compress(tensor)
            assert sent.dtype == wire and sent.shape == tensor.shape
            back = compressor.decompress(sent, context)
            assert back.dtype == dtype and torch.equal(back, tensor)
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64):
        tensor = torch.ones(3).to(dtype)
        for compressor in (hvd.Compression.none, hvd.Compression.fp16, hvd.Compression.bf16):
            sent, context = compressor.compress(tensor)
            assert sent is tensor
            assert compressor.decompress(sent, context) is tensor


def check_compressed_collectives():
    for compression in (hvd.Compression.none, hvd.Compression.fp16, hvd.Compression.bf16):
        for dtype in (torch.int32, torch.float32, torch.float64):
            tensor = torch.ones(4, dtype=dtype) * (hvd.rank() + 1)
            total = hvd.allreduce(tensor, op=hvd.Sum, compression=compression)
            assert total.dtype == dtype and (total == hvd.size() * (hvd.size() + 1) // 2).all()


class Doubled(hvd.Compression.fp16):
    """A user's own, made from one of ours."""

    calls = 0

    @staticmethod
    def compress(tensor):
        Doubled.calls += 1
        return (tensor * 2).to(torch.float64), tensor.dtype

    @staticmethod
    def decompress(tensor, ctx):
        return (tensor / 2).to(ctx)


class Flat(Compressor):
    """Sends another shape, and is an instance."""

    def compress(self, tensor):
        assert torch.isfinite(tensor).all()
        return tensor.reshape(-1).to(torch.bfloat16), (tensor.shape, tensor.dtype)

    def decompress(self, tensor, ctx):
        return tensor.view(ctx[0]).to(ctx[1])


@pytest.mark.parametrize("groups", [None, 2])
def check_compressors_of_a_user(groups):
    for compression, atol in ((Doubled, 1e-6), (Flat(), 1e-2)):
        model, reference = make_model(), make_model()
        optimizer = hvd.DistributedOptimizer(sgd(model), compression=compression, groups=groups)
        for step in range(3):
            optimizer.zero_grad()
            my_loss(model, step).backward()
            optimizer.synchronize()
            with optimizer.skip_synchronize():
                optimizer.step()
        train_alone(reference, sgd(reference), 3)
        expect_equal(model, reference, rtol=1e-4, atol=atol)
    assert hvd.size() == 1 or Doubled.calls > 0


class Growing(Compressor):
    """What it tells decompress is another thing in each step."""

    def __init__(self):
        self.scale = 1.0

    def compress(self, tensor):
        return tensor * self.scale, self.scale

    def decompress(self, tensor, ctx):
        return tensor / ctx


class InPlace(Compressor):
    """decompress gives back the very tensor that it was given."""

    def compress(self, tensor):
        return tensor / 2, None

    def decompress(self, tensor, ctx):
        return tensor.mul_(2)


def check_a_compressor_of_the_user_that_decompresses_in_place():
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.0), compression=InPlace())
    for _ in range(3):
        optimizer.zero_grad(set_to_none=False)
        parameter.sum().backward()
        optimizer.step()
        assert parameter.grad.tolist() == [1, 1]


@pytest.mark.parametrize("groups", [None, 1])
def check_a_compressor_of_the_user_where_a_rank_has_no_gradient(groups):
    """It is given zeros, so that what comes back is undone as in this step, from the first one on."""
    everywhere, on_one = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    compression = Growing()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([everywhere, on_one], lr=0.0), compression=compression,
                                         groups=groups)
    for step, who in enumerate([0, hvd.size() - 1, 0]):
        compression.scale = 8.0 ** step
        optimizer.zero_grad()
        loss = everywhere.sum()
        if hvd.rank() == who:
            loss = loss + hvd.size() * on_one.sum()
        loss.backward()
        optimizer.step()
        assert everywhere.grad.tolist() == [1, 1]
        torch.testing.assert_close(on_one.grad, torch.ones(2))


def check_compression_of_gradients_that_are_not_sent_as_they_are():
    for compression in (hvd.Compression.fp16, hvd.Compression.bf16):
        torch.manual_seed(7)
        mine = [torch.rand(shape).to(dtype) for shape, dtype in
                (((3,), torch.float32), ((2, 2), torch.float64), ((4,), torch.float16), ((), torch.float32))]
        theirs = [values.clone().requires_grad_() for values in mine]
        mine = [values.requires_grad_() for values in mine]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(mine, lr=0.1), compression=compression)
        for step in range(2):
            optimizer.zero_grad(set_to_none=step == 0)
            sum((p * p).sum() for p in mine).mul(1.0 + hvd.rank()).backward()
            optimizer.synchronize()
            for p, q in zip(mine, theirs):
                (q.grad,) = torch.autograd.grad((q * q).sum() * (1 + hvd.size()) / 2, q)
                assert p.grad.dtype == p.dtype
                torch.testing.assert_close(p.grad, q.grad, rtol=2e-2, atol=0)
