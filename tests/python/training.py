"""The training that the checks of the optimizer share: a small model, the data of all ranks, and the reference, which
trains in one process on all of them."""
import torch

import lightcc.torch as hvd

SAMPLES = 4  # a rank and step


def make_model():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 6), torch.nn.Tanh(),
                               torch.nn.Linear(6, 3))


def data(step):
    """Inputs and targets of all ranks."""
    torch.manual_seed(100 + step)
    return torch.randn(hvd.size() * SAMPLES, 5), torch.randn(hvd.size() * SAMPLES, 3)


def loss_of(model, x, y):
    return torch.nn.functional.mse_loss(model(x), y)


def my_loss(model, step):
    part = slice(hvd.rank() * SAMPLES, (hvd.rank() + 1) * SAMPLES)
    x, y = data(step)
    return loss_of(model, x[part], y[part])


def train_alone(model, optimizer, steps, passes=1, edit=lambda model: None):
    """The reference."""
    for step in range(steps):
        optimizer.zero_grad()
        for i in range(passes):
            loss_of(model, *data(passes * step + i)).backward()
        edit(model)
        optimizer.step()


def train(model, optimizer, steps, passes=1, set_to_none=True):
    for step in range(steps):
        optimizer.zero_grad(set_to_none=set_to_none)
        for i in range(passes):
            my_loss(model, passes * step + i).backward()
        optimizer.step()


def expect_equal(model, reference, rtol=1e-4, atol=1e-6):
    """Parameters are those of the reference, and have the same bits on all ranks."""
    for (name, p), q in zip(model.named_parameters(), reference.parameters()):
        torch.testing.assert_close(p, q, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}")
        every = hvd.allgather(p.detach().reshape(1, -1).view(torch.uint8))
        assert (every == every[0]).all(), f"{name} differs between the ranks"


OPTIMIZERS = {
    "SGD": lambda params, lr=0.1: torch.optim.SGD(params, lr=lr, momentum=0.9, weight_decay=0.01),
    "Adam": lambda params, lr=0.01: torch.optim.Adam(params, lr=lr),
    "AdamW": lambda params, lr=0.01: torch.optim.AdamW(params, lr=lr, amsgrad=True),
}


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, **options)


def pair(make=sgd, **options):
    """A model with its distributed optimizer, and the reference with its own plain one."""
    model, reference = make_model(), make_model()
    return model, hvd.DistributedOptimizer(make(model), **options), reference, make(reference)
