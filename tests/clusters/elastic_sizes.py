"""An elastic job that goes on until there is a file "stop". Each rank adds up the ranks of its world, in each step, and
says how many there are."""
import os
import time
from pathlib import Path


def train(folder, newcomers_after=""):
    """The sizes of the worlds that there have been. newcomers_after: the file for which those wait that come when there
    has been a world of two."""
    import numpy as np

    import lightcc.numpy as hvd
    from lightcc.common.elastic import ObjectState, run_fn
    from lightcc.core.objects import broadcast_object
    while newcomers_after and Path(folder, "size.1.2").exists() and not Path(folder, newcomers_after).exists():
        time.sleep(0.05)
    hvd.init()

    def steps(state):
        while not state.over:
            total = hvd.allreduce(np.array([1.0, float(Path(folder, "stop").exists())]), op=hvd.Sum, name="step")
            if not state.sizes or state.sizes[-1] != int(total[0]):
                state.sizes.append(int(total[0]))
                Path(folder, f"size.{len(state.sizes)}.{int(total[0])}").touch()
            own = Path(folder, f"pid.{os.getpid()}")
            own.write_text(str(os.getpid()))
            own.rename(Path(folder, f"rank.{hvd.rank()}.{hvd.size()}"))  # whole from the start
            state.over = bool(total[1])
            state.commit()
        return state.sizes

    def reset():
        hvd.shutdown()
        hvd.init()

    return run_fn(steps, reset)(ObjectState(broadcast_object, hvd.rank, sizes=[], over=False))
