"""`make gpu-test`: all that lightcc does on a GPU; on a machine with one, in less than nine minutes, without a network.

    python3 tests/gpu/run.py [WORD...]     where python3 has PyTorch with CUDA, pytest, psutil and, for its arrays, CuPy

WORD: only parts whose names have one of these run. Builds lightcc in build/gpu. Exits 77 where there is no GPU, 1 if a
part fails.
"""
import shutil
import sys
import tempfile

from parts import BUILD, CORE, PATH, ROOT, Parts
from two_hosts import variables

GPU = ROOT / "tests" / "gpu"
BY_NCCL = "tensors of GPUs: by NCCL"  # as lightcc's log says it
RANDOM_S = "20"
PYTEST = ["-m", "pytest", "-v", "-s", "--no-header", "--tb=short", "-p", "no:cacheprovider", "-o",
          "python_functions=check_*", "-o", "faulthandler_timeout=40", "--maxfail=20"]


def on_ranks(count: int, *files: str) -> list:
    """The command that runs the checks of these files on so many ranks."""
    return [sys.executable, "-m", "lightcc.runner", "-np", str(count), sys.executable, *PYTEST,
            *(str(GPU / file) for file in files)]


def of_ranks(count: int, file: str, *arguments: str, options=()) -> list:
    """The command that runs a program of this folder on so many ranks."""
    return [sys.executable, "-m", "lightcc.runner", "-np", str(count), *options, sys.executable, str(GPU / file),
            *arguments]


def main() -> int:
    parts = Parts("gpu-test", 530, only=sys.argv[1:])
    if not parts.build():
        return parts.finish()
    plugin = str(BUILD / "libnccl-net-harp.so")
    functions, python = str(GPU / "cuda_functions.sh"), sys.executable
    info = {"HOROVOD_LOG_LEVEL": "info"}
    short = {"LIGHTCC_GPU_TEST_SHORT": "1", **info}
    parts.run("functions of CUDA", [functions, CORE], 120)
    with tempfile.TemporaryDirectory() as folder:
        if parts.compile_table(f"{folder}/table.so"):
            parts.run("first use of the kernels", [python, str(GPU / "first_use.py"), f"{folder}/table.so", CORE], 90,
                      table=r"\d s\b")
    parts.run("staged, 2 ranks", on_ranks(2, "check_training.py", "check_collectives.py"), 150, LIGHTCC_NCCL="0")
    parts.run("SyncBatchNorm, staged, 2 ranks", on_ranks(2, "check_sync_batch_norm.py"), 60, LIGHTCC_NCCL="0")
    parts.run("SyncBatchNorm, NCCL, 2 ranks", on_ranks(2, "check_sync_batch_norm.py"), 60, BY_NCCL, **variables(),
              **info)
    parts.run("NCCL, 1 rank", on_ranks(1, "check_training.py", "check_collectives.py"), 90, BY_NCCL, LIGHTCC_NCCL="1",
              **info)
    parts.run("NCCL, 1 rank, 2 streams", on_ranks(1, "check_training.py"), 60, "on 2 streams", LIGHTCC_NCCL="1",
              HOROVOD_NUM_NCCL_STREAMS="2", **info)
    parts.run("NCCL, 2 ranks: training", on_ranks(2, "check_training.py"), 60, BY_NCCL, **variables(), **short)
    parts.run("NCCL, 2 ranks: collectives", on_ranks(2, "check_collectives.py"), 120, BY_NCCL, **variables(), **short)
    parts.run("NCCL, 2 x 2 ranks, 2D", of_ranks(4, "two_by_two.py"), 60, ", 2D for large all-reduces",
              **variables(per_host=2), LIGHTCC_NCCL_2D="1", **info)
    parts.run("staged: times of all kinds", of_ranks(2, "staged_times.py"), 60, table=r"\d µs", LIGHTCC_NCCL="0")
    ways = {"staged": ("", {"LIGHTCC_NCCL": "0"}), "NCCL": (BY_NCCL, {**variables(), **info})}
    for way, (expected, of_way) in ways.items():
        parts.run(f"random operations, {way}", of_ranks(2, "random_operations.py", RANDOM_S), 50, expected, **of_way)
    for way, (expected, of_way) in ways.items():
        parts.run(f"torch.compile, {way}", on_ranks(2, "check_compile.py"), 70, expected, **of_way)
    for way, (expected, of_way) in ways.items():
        parts.run(f"process group, {way}, 2 ranks", on_ranks(2, "check_process_group.py"), 60, expected, **of_way)
    elastic = of_ranks(3, "elastic_worker.py", options=["--min-np", "1", "--failures-per-host", "4"])
    parts.run("elastic, NCCL, two losses", elastic, 60, BY_NCCL, **variables(), **info)
    for way, expected in (("staged", ""), ("nccl", BY_NCCL)):
        parts.run(f"a killed rank, {way}", [python, str(GPU / "killed_rank.py"), way], 60, expected)
    parts.run("NCCL over HARP", [str(GPU / "nccl_harp.sh"), plugin], 90)
    parts.run("NCCL over HARP, three lives", [str(GPU / "nccl_harp.sh"), plugin, "3"], 90, "rank 1: ok")
    if sanitizer := shutil.which("compute-sanitizer", path=PATH):
        # Some of the calls fail on purpose: only what kernels do to memory is an error here.
        parts.run("functions, compute-sanitizer", [functions, CORE], 110,
                  UNDER=f"{sanitizer} --error-exitcode 1 --report-api-errors no")
    return parts.finish()


if __name__ == "__main__":
    sys.exit(main())
