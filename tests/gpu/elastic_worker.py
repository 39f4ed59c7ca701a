"""A worker of an elastic job by NCCL, which loses two of three: one by kill -9 between two batches, one while others
wait for it in an all-reduce; whoever is there goes on. Each batch adds exactly one to every parameter, so what was
trained can be counted. On a machine without a GPU it runs with tensors of the CPU.

    python -m lightcc.runner -np 3 --min-np 1 --failures-per-host 4 python tests/gpu/elastic_worker.py
"""
import os
import shutil
import signal
import tempfile
from pathlib import Path

import torch
from two_hosts import become_own_host_to_nccl

become_own_host_to_nccl()
import lightcc.torch as hvd  # noqa: E402  it is its own host now

BATCHES = 60
COUNTS = (1, 1000, 300_000)
LOSSES = {15: "between batches", 35: "in a batch"}  # by batch
DEVICE = "cuda:0" if torch.cuda.is_available() else "cpu"
# All workers are children of one launcher.
FOLDER = Path(tempfile.gettempdir(), f"lightcc-elastic-{os.getuid()}-{os.getppid()}")


def die_once(batch: int, where: str) -> None:
    """The last rank, if nobody has died here before."""
    if LOSSES.get(batch) != where or hvd.rank() != hvd.size() - 1 or hvd.size() == 1:
        return
    try:
        (FOLDER / f"loss.{batch}").touch(exist_ok=False)
    except FileExistsError:
        return
    print(f"rank {hvd.rank()} of {hvd.size()} is gone at batch {batch}", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


@hvd.elastic.run
def train(state):
    while state.batch < BATCHES:
        die_once(state.batch, "between batches")
        handles = [hvd.allreduce_async(torch.ones_like(weight), op=hvd.Sum, name=str(i))
                   for i, weight in enumerate(state.model.parameters()) if i > 0]
        die_once(state.batch, "in a batch")
        first, *others = state.model.parameters()
        sums = [hvd.allreduce(torch.ones_like(first), op=hvd.Sum, name="0"), *map(hvd.synchronize, handles)]
        with torch.no_grad():
            for weight, total in zip((first, *others), sums):
                weight += total / hvd.size()
        state.batch += 1
        state.sizes = [*state.sizes, hvd.size()]
        state.commit()


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    hvd.init()
    model = torch.nn.Module()
    model.all = torch.nn.ParameterList(torch.zeros(count, device=DEVICE) for count in COUNTS)
    state = hvd.elastic.TorchState(model, batch=0, sizes=[])
    train(state)
    assert state.batch == BATCHES == len(state.sizes), state.sizes
    for weight in model.parameters():
        assert (weight == BATCHES).all(), f"batches were lost or counted twice: {weight.min()} to {weight.max()}"
    losses = sorted(int(path.suffix[1:]) for path in FOLDER.glob("loss.*"))
    assert losses == sorted(LOSSES), losses
    hvd.barrier()  # all have looked
    rank = hvd.rank()
    if rank == 0:
        shutil.rmtree(FOLDER)
    hvd.shutdown()
    print(f"elastic, {len(losses)} losses, worlds of {sorted(set(state.sizes))}, rank {rank}: ok", flush=True)


if __name__ == "__main__":
    main()
