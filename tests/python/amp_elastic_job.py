"""A worker of an elastic job with lightcc.amp: `amp_elastic_job.py FOLDER STEPS KILL...` trains so many steps, whose
learning rate changes every PERIOD steps. The last rank kills itself once in each step KILL, behind its backward. In the
end all print what the policy and the loss scale have come to.
"""
import json
import os
import signal
import sys
from pathlib import Path

import torch

import lightcc.torch as hvd

PERIOD, HOLD = 8, 5
GROWTH = 7  # of the loss scale, from SCALE, after so many steps in float16
SCALE = 1.0


def expected(steps):
    """The levels of the steps, and the loss scale, where nobody dies."""
    levels = ["float32" if step >= PERIOD and 1 <= step % PERIOD <= HOLD else "float16" for step in range(steps)]
    return levels, SCALE * 2 ** (levels.count("float16") // GROWTH)


def main():
    folder, steps, kills = Path(sys.argv[1]), int(sys.argv[2]), {int(kill) for kill in sys.argv[3:]}
    hvd.init()
    torch.set_num_threads(1)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=GROWTH)
    precision = hvd.amp.MixedPrecision(optimizer, hvd.amp.HoldAfterLearningRateChange(HOLD), dtype=torch.float16,
                                       scaler=scaler)
    state = hvd.elastic.TorchState(model, optimizer, precision=precision, batch=0)

    @hvd.elastic.run
    def train(state):
        while state.batch < steps:
            optimizer.param_groups[0]["lr"] = 1e-3 * 2.0 ** -(state.batch // PERIOD % 2)
            optimizer.zero_grad()
            with precision:
                loss = (model(torch.ones(2, 4) + hvd.rank()) ** 2).mean()
            precision.backward(loss)
            once = folder / f"killed.{state.batch}"
            if state.batch in kills and hvd.rank() == hvd.size() - 1 and not once.exists():
                once.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            precision.step()
            state.batch += 1
            state.commit()

    train(state)
    found = [precision.history().levels(), scaler.get_scale(), [p.tolist() for p in model.parameters()]]
    every = hvd.allgather_object(found)
    levels, scale = expected(steps)
    right = every == [found] * hvd.size() and found[0] == levels and found[1] == scale
    print(f"end {json.dumps({'right': right, 'ranks': hvd.size(), 'levels': found[0], 'scale': found[1]})}", flush=True)


if __name__ == "__main__":
    main()
