#!/bin/sh
# The functions of liblightcc_cuda.so on a real GPU: copies, also many at once, order between streams, calls, memory,
# scaling with the bits of the CPU, errors in words, the caller's device. Exits 77 where there is no GPU or nvcc.
#
#   tests/gpu/cuda_functions.sh [LIBRARY.so]      UNDER: a program that starts it, with its options
set -eu
cd "$(dirname "$0")/../.."
library=$(realpath "${1:-build/cmake/liblightcc_cuda.so}")

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
[ -e "$library" ] || { echo "no $library: cmake --build build/cmake --target lightcc_cuda" >&2; exit 1; }
# UNDER is words.
timeout 120 ${UNDER:-} "$folder/cuda_functions" "$library"
