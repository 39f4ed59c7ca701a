"""`make gpu-compression`: the codecs of a GPU; on a machine with one, in less than seven minutes, without a network.

    python3 bench/gpu_compression.py         where python3 has PyTorch with CUDA

Builds lightcc in build/gpu, whose kernels NVRTC compiles, and with nvcc's CUDA runtime what measures it. Compares bits
with the CPU's codecs (tests/gpu/codec_bits.cc), also under compute-sanitizer, then measures (gpu_codecs.py). Exits 77
where there is no GPU, 1 if a part fails; a goal that is missed is printed as such, and is no failure.
"""
import importlib.util
import json
import os
import shlex
import shutil
import sys
from pathlib import Path

BENCH = Path(__file__).resolve().parent
sys.path.append(str(BENCH.parent / "tests" / "gpu"))
from parts import BUILD, PATH, ROOT, SITE, Parts  # noqa: E402  where the tests of GPUs are

LIMIT_S = 410
OUT = BUILD / "codecs"
# The CPU's codecs, with which bits are compared.
SOURCES = ["csrc/device/topk.cc", "csrc/device/topk_loops.cc", "csrc/device/topk_message.cc",
           "csrc/device/quantization.cc", "csrc/device/quantization_loops.cc", "csrc/device/cpu.cc",
           "csrc/device/float32.cc", "csrc/base/error.cc", "csrc/base/types.cc", "csrc/collective/piece_codec.cc",
           "csrc/collective/residual.cc"]
PROGRAMS = ["tests/gpu/codec_bits.cc", "bench/gpu_codecs.cc"]
RATIOS = r"\d (of copy|times|ms)\b|^  (kernels|batch|one)|GB/s"


def build_script() -> str:
    """A shell's: all files side by side. nvcc links, since it knows where CUDA's runtime is."""
    nvcc = shutil.which("nvcc", path=PATH) or "/usr/local/cuda/bin/nvcc"
    includes = [str(Path(nvcc).resolve().parent.parent / "include"), "/usr/local/cuda/include"]
    lines = [f"cd {shlex.quote(str(ROOT))}", f"mkdir -p {shlex.quote(str(OUT))}", "pids="]
    for source in (*SOURCES, *PROGRAMS):
        command = [os.environ.get("CXX", "c++"), "-std=c++20", "-O2", "-fPIC", "-ffp-contract=off", "-I", "csrc", "-I",
                   "tests", *(word for one in includes for word in ("-I", one)), "-c", source, "-o",
                   str(object_of(source))]
        lines.append(f"{shlex.join(command)} & pids=\"$pids $!\"")
    core = [str(object_of(source)) for source in SOURCES]
    links = [[nvcc, "-o", str(OUT / "codec_bits"), str(object_of(PROGRAMS[0])), *core, "-ldl"],
             [nvcc, "-shared", "-o", str(OUT / "gpu_codecs.so"), str(object_of(PROGRAMS[1])), *core, "-ldl"]]
    return "\n".join([*lines, "for pid in $pids; do wait $pid; done", *map(shlex.join, links)])


def nvrtc_folders() -> str:
    """Where libnvrtc may be: in PyTorch's wheels, and with nvcc."""
    found = importlib.util.find_spec("nvidia")
    wheels = [f"{path}/{name}/lib" for path in (found.submodule_search_locations or [] if found else [])
              for name in ("cu13", "cuda_nvrtc")]
    nvcc = Path(shutil.which("nvcc", path=PATH) or "/usr/local/cuda/bin/nvcc").resolve()
    before = os.environ.get("LD_LIBRARY_PATH")
    return os.pathsep.join([*([before] if before else []), *wheels, str(nvcc.parent.parent / "lib64")])


def object_of(source: str) -> Path:
    return OUT / (source.replace("/", "_") + ".o")


def main() -> int:
    parts = Parts("gpu-compression", LIMIT_S)
    if not parts.build() or not parts.run("compile what measures", ["sh", "-ec", build_script()], 90):
        return parts.finish()
    core = str(SITE / "lightcc" / "_lightcc.so")
    bits, library, python = [str(OUT / "codec_bits"), core], str(OUT / "gpu_codecs.so"), sys.executable
    folder = Path(os.environ.get("OUT") or BUILD)
    results, of_large = folder / "gpu-codecs.json", folder / "gpu-codecs-large.json"
    times = [python, str(BENCH / "gpu_codecs.py"), library, core]
    all_times = ["encode", "decode", "int8", "torch", "batch", "drift"]
    beside = {"LD_LIBRARY_PATH": nvrtc_folders()}  # of a program without a framework, beside which NVRTC is found
    parts.run("bits of 2,000 pieces", [*bits, "2000", "100000"], 60, "forged messages: ", **beside)
    parts.run("kernels", [*times, str(results), *all_times], 110, table=RATIOS)
    parts.run("2^31 + 3 elements", [*times, str(of_large), "large"], 40, table=RATIOS)
    if sanitizer := shutil.which("compute-sanitizer", path=PATH):
        for tool in ("memcheck", "racecheck"):
            # Some calls fail where nothing is wrong, as the one that asks for an event that is not reached.
            command = [sanitizer, "--tool", tool, "--error-exitcode", "1", "--report-api-errors", "no", *bits]
            parts.run(f"bits of 40 pieces, {tool}", [*command, "40", "20000"], 60, "forged messages: ", **beside)
    else:
        print("LEFT OUT: no compute-sanitizer", flush=True)
    parts.report["rows"] = [one for file in (results, of_large) if file.exists()
                            for one in json.loads(file.read_text())]
    return parts.finish()


if __name__ == "__main__":
    sys.exit(main())
