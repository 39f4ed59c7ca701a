"""Checks what a wheel's _lightcc.so exports and needs, and prints the newest glibc symbol version among the latter.

    python .ci/symbols.py dist/*.whl

Exits 1 if it exports anything but lightcc_*, or needs a library other than libc's own.
"""
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

LIBC = re.compile(r"(libc|libm|libpthread|libdl|librt|ld-linux-[\w-]+)\.so\.\d+")


def inspect(library: str) -> list[str]:
    dynamic = subprocess.check_output(["readelf", "--wide", "--dynamic", library], text=True)
    symbols = subprocess.check_output(["readelf", "--wide", "--dyn-syms", library], text=True)
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic)
    # Num: Value Size Type Bind Vis Ndx Name
    rows = [line.split() for line in symbols.splitlines() if re.match(r"\s+\d+:", line)]
    exported = [row[7] for row in rows if len(row) > 7 and row[6] != "UND"]
    versions = {tuple(map(int, v.split("."))) for v in re.findall(r"@GLIBC_([\d.]+)", symbols)}
    newest = max(versions)
    names = [row[7] for row in rows if len(row) > 7 and row[7].endswith(f"@GLIBC_{'.'.join(map(str, newest))}")]
    print(f"_lightcc.so: {len(exported)} symbols exported; needs {', '.join(needed)}")
    print(f"_lightcc.so: newest glibc version needed: {'.'.join(map(str, newest))} ({', '.join(names)})")
    return [f"exports {name}" for name in exported if not name.startswith("lightcc_")] + [
        f"needs {name}" for name in needed if not LIBC.fullmatch(name)
    ]


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(sys.argv[1]) as wheel:
            faults = inspect(wheel.extract("lightcc/_lightcc.so", folder))
    for fault in faults:
        print(f"{Path(sys.argv[1]).name}: _lightcc.so {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
