"""SyncBatchNorm of a real GPU's tensors beside mean and variance that are written out in float64 on the CPU: in every
memory format and dtype, under autocast, with ranks that have other rows or none. Every rank runs it, as
check_collectives.py."""
import pytest
import torch
from test_sync_batch_norm import expect_written_out, formats, new_layer, some_formats, values

import lightcc.torch as hvd
from lightcc.torch.batch_norm_kernels import wide

TOLERANCES = {torch.float64: 1e-7, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 0.15}
SHAPES = [(4, 5), (4, 1), (4, 5, 3), (4, 5, 3, 2), (1, 5, 3, 1), (1, 5, 1, 3), (4, 6, 3, 1), (4, 5, 3, 1, 1),
          (2, 5, 2, 1, 3), (2, 64, 16, 16)]  # the last has more values than a block of threads
FEW_ROWS = (0, 1)  # of the first rank


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def check_every_format(device, dtype, shape):
    tolerance = {"rtol": TOLERANCES[dtype], "atol": TOLERANCES[dtype]}
    for turn, (strides, of_grad) in enumerate(some_formats(shape)):
        layer = new_layer(shape[1], affine=turn % 2 == 0).to(device, wide(dtype))
        every, grads = ([values(shape, how, seed + 10 * rank, dtype) for rank in range(hvd.size())]
                        for how, seed in ((strides, 1), (of_grad, 2)))
        if hvd.size() > 1 and turn > 1:
            rows = FEW_ROWS[turn % 2]
            every[0], grads[0] = every[0][:rows], grads[0][:rows]
        layer.train()
        if sum(x.numel() for x in every) > shape[1]:
            expect_written_out(layer, every, grads, f"cuda:{device}", **tolerance)
        layer.eval()
        if all(len(x) for x in every):
            expect_written_out(layer, every, grads, f"cuda:{device}", (layer.running_mean, layer.running_var),
                               **tolerance)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last], ids=str)
def check_autocast(device, dtype, form):
    """A vision model's first layers, whose ReLU works in place."""
    torch.manual_seed(hvd.rank())
    x = torch.randn(4, 3, 9, 9).to(device, memory_format=form)
    gradients = []
    for cast in (True, False):
        torch.manual_seed(8)
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), hvd.SyncBatchNorm(8), torch.nn.ReLU(inplace=True))
        model.to(device, memory_format=form)
        with torch.autocast("cuda", dtype, enabled=cast):
            y = model(x)
            assert y.dtype == (dtype if cast else torch.float32) and y.is_contiguous(memory_format=form)
        y.float().square().mean().backward()
        gradients.append([p.grad for p in model.parameters()])
    for found, expected in zip(*gradients):
        torch.testing.assert_close(found, expected, rtol=0.1, atol=0.02)


def check_it_is_what_pytorch_has_on_one_rank(device):
    """Statistics that were moved, too."""
    x = values((4, 5, 3, 2), formats((4, 5, 3, 2))[0], 1, torch.float32).to(device)
    every = hvd.allgather(x.contiguous())
    layer, whole = new_layer(5).to(device), torch.nn.BatchNorm2d(5).to(device)
    whole.load_state_dict(layer.state_dict())
    layer(x)
    whole(every)
    for name, buffer in layer.named_buffers():
        torch.testing.assert_close(buffer, whole.get_buffer(name), rtol=1e-4, atol=1e-5)
