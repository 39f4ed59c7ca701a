#!/usr/bin/env bash
# pytorch-ignite's own tests of its Horovod backend, run on lightcc by way of `python -m lightcc.as_horovod --install`.
#
#   make build/installed                                  # lightcc and torch in .venv
#   tests/clients/pytorch_ignite.sh                       # ignite's newest release: its sdist on PyPI has the tests
#   tests/clients/pytorch_ignite.sh path/to/ignite        # a checkout instead
#   tests/clients/pytorch_ignite.sh "" -k all_reduce      # more arguments are pytest's
#
# Makes build/clients/ignite, a virtual environment with this lightcc as Horovod and with ignite; torch, numpy and pytest
# are those of .venv. Takes some minutes, as nearly every test starts processes; not a part of `make test`.
#
# Left out are tests that want a GPU (cuda) and, by ignite's own marks, those for machines without Horovod.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
ignite=${1:-}
shift || true
where=$root/build/clients
mkdir -p "$where"
site=$("$root/.venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
[ -d "$site/lightcc" ] || { echo "lightcc is not in .venv: make build/installed" >&2; exit 1; }

rm -rf "$where/ignite"
"$root/.venv/bin/python" -m venv "$where/ignite"
python=$where/ignite/bin/python
own=$("$python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
cp -r "$site"/lightcc "$site"/lightcc-*.dist-info "$own"
echo "$site" > "$own/zz_venv.pth"

if [ -z "$ignite" ]; then
  rm -rf "$where/sdist" && mkdir "$where/sdist"
  "$python" -m pip download -q --disable-pip-version-check --no-deps --no-binary pytorch-ignite --dest "$where/sdist" \
    pytorch-ignite
  tar -xzf "$where"/sdist/*.tar.gz -C "$where/sdist"
  ignite=$(echo "$where"/sdist/*/)
fi
ignite=$(cd "$ignite" && pwd)
"$python" -m pip install -q --disable-pip-version-check --no-deps "$ignite"
"$python" -m pip install -q --disable-pip-version-check packaging

cd "$where"  # in the source tree `import lightcc` would find the folder without its library
"$python" -m lightcc.as_horovod --install
cd "$ignite"
PATH="$where/ignite/bin:$PATH" OMP_NUM_THREADS=1 "$python" -m pytest -p no:cacheprovider -rs tests/ignite/distributed \
  -k "(hvd or horovod) and not cuda" "$@"
