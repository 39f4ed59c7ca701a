"""`make gpu-bench`: how fast lightcc is on a GPU; on a machine with one, in less than nine minutes, without a network.

    python3 bench/gpu.py [BEFORE.so]         where python3 has PyTorch with CUDA

Builds lightcc in build/gpu. Measures its kernels beside copies (gpu_kernels.py), and, by turns, beside those of another
build's library, if one is given; a training step beside DistributedDataParallel's (gpu_step.py); and all-reduces of two
ranks that share the GPU: through the host, by NCCL, and by NCCL over HARP (gpu_allreduce.py). Exits 77 where there is
no GPU, 1 if a part fails; a goal that is missed is printed as such, and is no failure.
"""
import json
import sys
import tempfile
from pathlib import Path

BENCH = Path(__file__).resolve().parent
sys.path.append(str(BENCH.parent / "tests" / "gpu"))
from parts import CORE, Parts  # noqa: E402  where the tests of GPUs are
from two_hosts import variables  # noqa: E402

BY_NCCL = "tensors of GPUs: by NCCL"  # as lightcc's log says it
TIMES = r"\d (µs|ms)\b"
WAYS = {  # of two ranks: what lightccrun is told, and the ranks' variables
    "through the host": ([], {"LIGHTCC_NCCL": "0"}),
    "by NCCL": ([], {}),
    "by NCCL over HARP": (["--harp"], {}),
}


def on_ranks(count: int, *command: str, options=()) -> list:
    return [sys.executable, "-m", "lightcc.runner", "-np", str(count), *options, sys.executable, *command]


def main() -> int:
    parts = Parts("gpu-bench", 530)
    if not parts.build():
        return parts.finish()
    with tempfile.TemporaryDirectory() as folder:
        table = f"{folder}/table.so"
        results = {name: Path(folder, f"{name}.json") for name in ("kernels", "step", *WAYS)}
        if parts.compile_table(table):
            parts.run("kernels", [sys.executable, str(BENCH / "gpu_kernels.py"), table, CORE, str(results["kernels"]),
                                  *sys.argv[1:]], 150, table=TIMES)
        parts.run("step beside DDP's", on_ranks(1, str(BENCH / "gpu_step.py"), str(results["step"]), f"{folder}/ddp"),
                  150, BY_NCCL, TIMES, LIGHTCC_NCCL="1", HOROVOD_LOG_LEVEL="info")
        for way, (options, changed) in WAYS.items():
            command = on_ranks(2, str(BENCH / "gpu_allreduce.py"), str(results[way]), f"{folder}/{way}.meeting",
                               options=options)
            parts.run(f"all-reduce {way}", command, 90, BY_NCCL if "NCCL" in way else "", TIMES,
                      **{**variables(), **changed, "HOROVOD_LOG_LEVEL": "info"})
        parts.report["rows"] = {name: json.loads(file.read_text()) for name, file in results.items() if file.exists()}
    return parts.finish()


if __name__ == "__main__":
    sys.exit(main())
