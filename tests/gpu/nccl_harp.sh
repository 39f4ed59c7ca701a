#!/bin/sh
# Two ranks of NCCL on one GPU, which take each other for ranks of two hosts, over HARP's plugin. Exits 77 where there is
# no GPU, nvcc or NCCL.
#
#   tests/gpu/nccl_harp.sh [PLUGIN.so [LIVES]]      NCCL_HOME: where include/nccl.h and lib/libnccl.so.2 lie
#
# LIVES: how many communicators there are, one after the other; NCCL closes the plugin between them.
set -eu
cd "$(dirname "$0")/../.."
plugin=$(realpath "${1:-build/cmake/libnccl-net-harp.so}")
lives=${2:-1}

left_out() {
  echo "LEFT OUT: $1"
  exit 77
}

nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
[ -x "$nvcc" ] || left_out "no nvcc"
nccl=${NCCL_HOME:-$(python3 -c 'import nvidia.nccl as nccl; print(list(nccl.__path__)[0])' 2>/dev/null || echo /usr)}
[ -e "$nccl/include/nccl.h" ] || left_out "no nccl.h in $nccl/include; set NCCL_HOME, or pip install nvidia-nccl-cu13"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
library=$(find "$nccl/lib" "$nccl/lib64" "$nccl"/lib/*-linux-gnu -maxdepth 1 -name 'libnccl.so*' 2>/dev/null | head -n 1)
[ -n "$library" ] || left_out "no libnccl.so in $nccl/lib"
libraries=$(dirname "$library")
"$nvcc" -std=c++17 -O2 -I "$nccl/include" tests/gpu/nccl_harp.cu -o "$folder/nccl_harp" \
  -L "$libraries" -l ":$(basename "$library")" -Xlinker -rpath -Xlinker "$libraries"
nvidia-smi -L >/dev/null 2>&1 || left_out "no GPU (nccl_harp.cu compiles)"
[ -e "$plugin" ] || { echo "no $plugin: make harp" >&2; exit 1; }

export NCCL_NET_PLUGIN="$plugin" NCCL_NET=HARP NCCL_SOCKET_IFNAME=lo NCCL_IB_DISABLE=1 NCCL_P2P_DISABLE=1
export NCCL_SHM_DISABLE=1 NCCL_MAX_CTAS=2 NCCL_DEBUG="${NCCL_DEBUG:-INFO}" NCCL_DEBUG_SUBSYS=INIT,NET
NCCL_HOSTID=harp-test-0 timeout 300 "$folder/nccl_harp" 0 2 "$folder/id" "$lives" >"$folder/rank0" 2>&1 &
first=$!
code=0
NCCL_HOSTID=harp-test-1 timeout 300 "$folder/nccl_harp" 1 2 "$folder/id" "$lives" >"$folder/rank1" 2>&1 || code=$?
wait "$first" || code=$?
if [ "$code" -ne 0 ]; then
  tail -n 60 "$folder/rank0" "$folder/rank1"
  exit 1
fi
for rank in 0 1; do
  grep -E 'NET/HARP|ok$' "$folder/rank$rank"
  used=$(awk '/^life [0-9]+ begins/ { life = $2 } /NET\/HARP : sending to/ && !used[life]++ { n++ } END { print n + 0 }' \
    "$folder/rank$rank")
  [ "$used" -eq "$lives" ] || { echo "rank $rank used HARP in $used of $lives lives" >&2; exit 1; }
done
