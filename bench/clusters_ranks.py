"""What runs on the ranks of bench/clusters.py. cloudpickle sends these functions by value."""


def steps(count):
    """Seconds of each."""
    import time

    import torch

    import lightcc.torch as hvd

    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512), torch.nn.ReLU(),
                                torch.nn.Linear(512, 10))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01),
                                         named_parameters=model.named_parameters())
    inputs, goals = torch.randn(64, 64), torch.randn(64, 10)
    found = []
    for _ in range(count):
        begin = time.perf_counter()
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), goals).backward()
        optimizer.step()
        found.append(time.perf_counter() - begin)
    return found


def first():
    """When this process began, and when its first all-reduce was done."""
    import time

    import numpy as np
    import psutil

    import lightcc.numpy as hvd
    hvd.init()
    hvd.allreduce(np.ones(1))
    return psutil.Process().create_time(), time.time()


def until_it_fails(folder):
    """Says its process, and when it has got an error."""
    import os
    import time
    from pathlib import Path

    import numpy as np

    import lightcc.numpy as hvd
    hvd.init()
    hvd.allreduce(np.ones(1))
    own = Path(folder, f"own.{hvd.rank()}")
    own.write_text(str(os.getpid()))
    own.rename(Path(folder, f"rank.{hvd.rank()}"))
    rank = hvd.rank()
    try:
        while True:
            hvd.allreduce(np.ones(1))
    except hvd.HorovodInternalError:
        Path(folder, f"error.{rank}").write_text(str(time.time()))
        raise


def elastic(folder):
    """The times of all steps, with the size of the world in each."""
    import time
    from pathlib import Path

    import numpy as np

    import lightcc.numpy as hvd
    from lightcc.common.elastic import ObjectState, run_fn
    from lightcc.core.objects import broadcast_object
    hvd.init()

    def train(state):
        while not state.over:
            total = hvd.allreduce(np.array([1.0, float(Path(folder, "stop").exists())]), op=hvd.Sum, name="step")
            size = int(total[0])
            if not state.times or state.times[-1][1] != size:
                Path(folder, f"size.{size}.{len(state.times)}").touch()
            state.times.append((time.time(), size))
            state.over = bool(total[1])
            state.commit()
            time.sleep(0.005)
        return state.times

    def reset():
        hvd.shutdown()
        hvd.init()

    return run_fn(train, reset)(ObjectState(broadcast_object, hvd.rank, times=[], over=False))
