"""Four ranks on one GPU, as two hosts of two: all-reduces of every size class by NCCL, which are hierarchical (2D) from
1 MiB on, to the bit; and process sets that cross each other and the hosts, in another order on each rank. On a machine
without a GPU it runs with tensors of the CPU.

    LIGHTCC_NCCL_2D=1 python -m lightcc.runner -np 4 python tests/gpu/two_by_two.py    with two_hosts.variables(2)
"""
import random

import torch
from two_hosts import become_own_host

COUNTS = (1, 1000, (1 << 18) + 3, 5_000_001)  # floats; 2D cuts from 8 MiB on
SETS = ([0, 1], [1, 2], [2, 3], [0, 3], [0, 1, 3])
ROUNDS = 4


def main() -> None:
    become_own_host()
    import lightcc.torch as hvd
    sets = [hvd.ProcessSet(ranks) for ranks in SETS]
    hvd.init(process_sets=sets)
    assert (hvd.size(), hvd.local_size(), hvd.cross_size()) == (4, 2, 2)
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    for count in COUNTS:
        for dtype in (torch.float32, torch.int64, torch.float16):
            numbers = torch.arange(count, device=device) % 11
            x = (numbers + hvd.rank()).to(dtype)
            assert torch.equal(hvd.allreduce(x, op=hvd.Sum), (4 * numbers + 6).to(dtype)), (count, dtype)
            x = (2 * numbers * hvd.rank()).to(dtype)
            hvd.allreduce_(x)
            assert torch.equal(x, (3 * numbers).to(dtype)), (count, dtype)
    order = random.Random(hvd.rank())
    for _ in range(ROUNDS):
        started = []
        for one in order.sample(sets, len(sets)):
            if hvd.rank() in one.ranks:
                x = torch.full((100_000,), float(hvd.rank() + 1), device=device)
                started.append((one, hvd.allreduce_async(x, op=hvd.Sum, process_set=one)))
        for one, handle in started:
            assert (hvd.synchronize(handle) == sum(one.ranks) + len(one.ranks)).all(), one
    hvd.shutdown()
    print("2 x 2 ranks: ok", flush=True)


if __name__ == "__main__":
    main()
