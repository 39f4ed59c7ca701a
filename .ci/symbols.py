"""Checks what the libraries of a wheel export, what they and its programs need, and prints the newest glibc version.

    python .ci/symbols.py dist/*.whl

Exits 1 if one exports anything but its own, or needs a library other than libc's own and those it may need, or if a
program is not there, cannot be run or does not say how it is used.
"""
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

LIBC = r"(libc|libm|libpthread|libdl|librt|ld-linux-[\w-]+)\.so\.\d+"
LIBRARIES = {  # what it exports, and what it may need
    "_lightcc.so": (r"lightcc_\w+", LIBC),
    "_lightcc_tensorflow.so": (r"lightcc_\w+", LIBC + r"|_lightcc\.so"),
    "_lightcc_embedding.so": (r"lightcc_embedding_\w+", LIBC + r"|_lightcc\.so"),
    "_lightcc_embedding_tensorflow.so": (r"lightcc_embedding_tensorflow_\w+",
                                         LIBC + r"|_lightcc\.so|_lightcc_embedding\.so"),
    "liblightcc_jax.so": (r"MPIX?ABI_\w+|mpiabi_version_\w+|mpiwrapper_\w+", LIBC + r"|_lightcc\.so"),
    "libnccl-net-harp.so": (r"ncclNetPlugin_v\d+", LIBC),
    "libharp.so": (r"harp_\w+", LIBC),
}
PROGRAMS = ["harpd", "harp-stat", "harp-bench"]  # which need libc alone


def inspect(name: str, library: str, own: str, allowed: str) -> list[str]:
    dynamic = subprocess.check_output(["readelf", "--wide", "--dynamic", library], text=True)
    symbols = subprocess.check_output(["readelf", "--wide", "--dyn-syms", library], text=True)
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic)
    # Num: Value Size Type Bind Vis Ndx Name
    rows = [line.split() for line in symbols.splitlines() if re.match(r"\s+\d+:", line)]
    exported = [row[7] for row in rows if len(row) > 7 and row[6] != "UND"]
    versions = {tuple(map(int, v.split("."))) for v in re.findall(r"@GLIBC_([\d.]+)", symbols)}
    newest = max(versions)
    names = [row[7] for row in rows if len(row) > 7 and row[7].endswith(f"@GLIBC_{'.'.join(map(str, newest))}")]
    print(f"{name}: {len(exported)} symbols exported; needs {', '.join(needed)}")
    print(f"{name}: newest glibc version needed: {'.'.join(map(str, newest))} ({', '.join(names)})")
    return [f"{name} exports {symbol}" for symbol in exported if not re.fullmatch(own, symbol)] + [
        f"{name} needs {other}" for other in needed if not re.fullmatch(allowed, other)
    ]


def inspect_program(name: str, wheel: zipfile.ZipFile, folder: str) -> list[str]:
    """As pip installs it: from the wheel's folder of scripts, whose files it makes commands as they are."""
    for entry in wheel.infolist():
        if not entry.filename.endswith(f".data/scripts/{name}"):
            continue
        program = wheel.extract(entry, folder)
        os.chmod(program, 0o755)
        done = subprocess.run([program, "--help"], capture_output=True, text=True)
        said = [] if done.returncode == 0 and name in done.stdout else [f"{name} --help: {done}"]
        return inspect(name, program, r".*", LIBC) + said
    return [f"{name} is not in the wheel"]


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(sys.argv[1]) as wheel:
            faults = [fault for name, rule in LIBRARIES.items()
                      for fault in inspect(name, wheel.extract(f"lightcc/{name}", folder), *rule)]
            faults += [fault for name in PROGRAMS for fault in inspect_program(name, wheel, folder)]
            for name in ("lightcc/include/harp.h", "lightcc/share/harpd.service"):
                faults += [] if name in wheel.namelist() else [f"{name} is not in the wheel"]
    for fault in faults:
        print(f"{Path(sys.argv[1]).name}: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
