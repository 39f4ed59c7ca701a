"""kill -9 of rank 1 of two, in the middle of all-reduces of GPU tensors: rank 0 hears of it within five seconds, by
HorovodInternalError, and no stream of its GPU hangs. By NCCL the ranks take each other for ranks of two hosts.

    python tests/gpu/killed_rank.py staged|nccl
"""
import sys
import time
from pathlib import Path

from two_hosts import variables

sys.path.append(str(Path(__file__).parents[1] / "python"))
from test_termination import DEADLINE, Ranks  # noqa: E402  where the tests of Python are

WITHIN_S = 60  # for what is not measured: starting, and ending in order
LOOP = f"""
import sys, time
sys.path.append({str(Path(__file__).parent)!r})
from two_hosts import become_own_host
become_own_host()
import torch, lightcc.torch as hvd
hvd.init()
tensors = [torch.zeros(count, device="cuda") for count in (1, 1000, 100_000, 3_000_000)]
def step():
    for handle in [hvd.allreduce_async_(x, name=str(i)) for i, x in enumerate(tensors)]:
        hvd.synchronize(handle)
for _ in range(3):
    step()
torch.cuda.synchronize()
print("ready", flush=True)
try:
    while True:
        step()
except hvd.HorovodInternalError as error:
    print("told", time.time(), error, flush=True)
torch.cuda.synchronize()
print("streams", time.time(), flush=True)
hvd.shutdown()
"""


def main() -> None:
    way = {**variables(), "HOROVOD_LOG_LEVEL": "info"} if sys.argv[1] == "nccl" else {"LIGHTCC_NCCL": "0"}
    with Ranks(2, LOOP, **way) as ranks:
        for process in ranks.processes:
            while (line := process.stdout.readline()) != "ready\n":
                print(line, end="")
                if not line:
                    sys.exit("FAILED before it was ready")
        time.sleep(0.5)
        ranks.kill(1)
        killed = time.time()
        text = ranks.output(0, WITHIN_S)
    print(text)
    told, streams = (float(line.split()[1]) - killed for word in ("told ", "streams ")
                     for line in text.splitlines() if line.startswith(word))
    print(f"rank 0 was told after {told:.2f} s, its streams were free after {streams:.2f} s")
    if max(told, streams) > DEADLINE or "rank 1" not in text:
        sys.exit("FAILED")
    print("rank 0: ok")


if __name__ == "__main__":
    main()
