#!/bin/sh
# The functions by which lightcc uses a GPU on a real one: copies, also many at once, order between streams, calls,
# memory, scaling with the bits of the CPU, errors in words, the caller's device. Exits 77 where there is no GPU or nvcc,
# which this test alone needs.
#
#   tests/gpu/cuda_functions.sh [CORE.so]      UNDER: a program that starts it, with its options
set -eu
cd "$(dirname "$0")/../.."
library=$(realpath "${1:-build/cmake/_lightcc.so}")

left_out() {
  echo "LEFT OUT: $1"
  exit 77
}

nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
[ -x "$nvcc" ] || left_out "no nvcc"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
reduce="csrc/device/cpu.cc csrc/base/error.cc csrc/base/types.cc"
"$nvcc" -std=c++20 -O2 -Xcompiler=-ffp-contract=off -I csrc -I tests tests/gpu/cuda_functions.cu $reduce \
  -o "$folder/cuda_functions" -ldl
nvidia-smi -L >/dev/null 2>&1 || left_out "no GPU (cuda_functions.cu compiles)"
[ -e "$library" ] || { echo "no $library: cmake --build build/cmake --target _lightcc" >&2; exit 1; }
# The program has no framework, beside which lightcc would find NVRTC: it is where PyTorch has it, or with nvcc.
wheels=$(python3 -c 'import nvidia; print(":".join(f"{p}/{f}/lib" for p in nvidia.__path__ for f in ("cu13", "cuda_nvrtc")))' \
  2>/dev/null || true)
export LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$wheels:$(dirname "$nvcc")/../lib64"
# UNDER is words.
timeout 120 ${UNDER:-} "$folder/cuda_functions" "$library"
