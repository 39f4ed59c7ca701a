"""How long the kernels take until they can run, in processes of their own, in which PyTorch uses the GPU already: with
nothing in the cache on disk, when NVRTC compiles them, and then with it. tests/gpu/run.py starts it.

    python first_use.py TABLE.so CORE.so        TABLE.so: of bench/gpu_table
"""
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))
MOST_S = {"an empty cache": 0.5, "another empty cache": 0.5, "that cache": 0.02}
CHILD_S = 60


def child(table: str, core: str) -> None:
    import gpu_kernels
    import torch

    import lightcc.torch as hvd
    torch.ones(1, device="cuda").sum().item()
    hvd.init()  # which names the folder of the cache
    functions = gpu_kernels.Table(table, core)
    begin = time.perf_counter()
    functions.load_kernels()
    print(time.perf_counter() - begin)
    hvd.shutdown()


def seconds(cache: str, *arguments: str) -> float:
    environment = {**os.environ, "LIGHTCC_CACHE_DIR": cache}
    done = subprocess.run([sys.executable, __file__, "child", *arguments], env=environment, stdout=subprocess.PIPE,
                          text=True, timeout=CHILD_S, check=True)
    return float(done.stdout.split()[-1])


def main() -> None:
    missed = []
    with tempfile.TemporaryDirectory() as folder:
        for what, name in zip(MOST_S, ("first", "second", "second")):
            took = seconds(f"{folder}/{name}", *sys.argv[1:])
            print(f"{what:<22}{took:>8.3f} s  <= {MOST_S[what]} s", flush=True)
            if took > MOST_S[what]:
                missed.append(f"MISSED: with {what} the kernels take {took:.3f} s")
        kept = list(Path(folder).glob("*/kernels/*"))
        assert kept, "nothing is in the cache"
        print(*(f"{path.name} {path.stat().st_size}" for path in kept), sep="\n")
    if missed:
        sys.exit("\n".join(missed))


if __name__ == "__main__":
    if sys.argv[1] == "child":
        child(*sys.argv[2:])
    else:
        main()
