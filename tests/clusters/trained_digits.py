"""A training whose losses every way of starting it must repeat bit for bit: digits, by each rank its own images."""
import os
import signal


def train(steps=20, batch=32):
    """The losses that this rank sees. Without batch norm and dropout; on one thread, whose sums have one order."""
    import torch
    from sklearn.datasets import load_digits

    import lightcc.torch as hvd

    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(hvd.rank())  # broadcast makes the weights those of rank 0
    data = load_digits()
    images = torch.tensor(data.data[hvd.rank()::hvd.size()] / 16, dtype=torch.float32)
    labels = torch.tensor(data.target[hvd.rank()::hvd.size()])
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1),
                                         named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    losses = []
    for step in range(steps):
        part = slice(step * batch, (step + 1) * batch)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images[part]), labels[part])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def die(rank):
    """That rank is killed while the others wait for it."""
    import numpy as np

    import lightcc.numpy as hvd

    hvd.init()
    hvd.allreduce(np.ones(1))
    if hvd.rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    hvd.allreduce(np.ones(1))


def world():
    """What hvd says, and what the variables do."""
    import numpy as np

    import lightcc.numpy as hvd

    hvd.init()
    names = ["RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE"]
    said = [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()]
    return said, [int(os.environ[f"HOROVOD_{name}"]) for name in names], float(
        hvd.allreduce(np.ones(1) * hvd.rank(), op=hvd.Sum)[0])
