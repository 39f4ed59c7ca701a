"""A worker of an elastic job with fewer exchanges: `periodic_elastic_job.py KIND FOLDER STEPS PHASE.STEP...` trains so
many steps. The last rank kills itself once at each PHASE.STEP. In the end all print whether they hold the same weights.
KIND: delayed, local or diloco."""
import functools
import os
import signal
import sys
from pathlib import Path

import torch

import lightcc.torch as hvd
from lightcc.torch import delayed_slots, periodic

KIND, FOLDER, STEPS, KILLS = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), set(sys.argv[4:])
step = 0  # that this rank is in


def point(phase):
    """A worker whose death is ordered here is gone."""
    once = FOLDER / f"{phase}.{step}"
    if once.name in KILLS and hvd.rank() == hvd.size() - 1 and not once.exists():
        once.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def with_point(cls, name, phase):
    """Puts a point before a method."""
    method = getattr(cls, name)

    @functools.wraps(method)
    def called(self, *arguments, **named):
        point(phase)
        return method(self, *arguments, **named)
    setattr(cls, name, called)


def main():
    global step
    with_point(periodic.PeriodicExchange, "_begin", "begin")
    with_point(periodic.PeriodicExchange, "_end", "end")
    with_point(delayed_slots.Slot, "deliver", "end")
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(hvd.rank())
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1))
    inner = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5)
    optimizer = {"delayed": lambda: hvd.DelayedGradients(inner, 2, named_parameters=model.named_parameters()),
                 "local": lambda: hvd.LocalSGD(inner, 3, model.named_parameters(), delay=1),
                 "diloco": lambda: hvd.DiLoCo(model, inner, sync_every=4, fragments=2, delay=1)}[KIND]()
    state = hvd.elastic.TorchState(model, optimizer, batch=0)

    @hvd.elastic.run
    def train(state):
        global step
        while state.batch < STEPS:
            step = state.batch
            optimizer.zero_grad()
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * state.batch + hvd.rank()))
            (model(x) - x.sum(dim=1, keepdim=True)).square().mean().backward()
            point("backward")
            optimizer.step()
            point("step")
            state.batch += 1
            state.commit()
            point("commit")

    train(state)
    if KIND != "delayed":
        optimizer.exchange_now()
    hvd.check_weights(model)
    x = torch.randn(256, 4, generator=torch.Generator().manual_seed(1))
    loss = (model(x) - x.sum(dim=1, keepdim=True)).square().mean().item()
    print(f"end {KIND} batch {state.batch} size {hvd.size()} loss {loss:.6f}", flush=True)


if __name__ == "__main__":
    main()
