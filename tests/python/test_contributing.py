"""CONTRIBUTING.md's example, a codec, as it is there: its blocks are applied to a copy of the sources, which are then
compiled and tested."""
import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE[PAGE.index("## Example"):], re.DOTALL)
COMPILER = [os.environ.get("CXX", "c++"), "-std=c++20", "-O0", "-pthread", "-Wall", "-Wextra", "-Werror", "-Icsrc"]
SOURCES = ("collective/piece_codec.cc", "base/types.cc", "base/error.cc", "device/quantization.cc",
           "device/quantization_loops.cc", "device/topk.cc", "device/topk_loops.cc", "device/topk_message.cc",
           "device/cpu.cc", "device/float32.cc")


def apply(folder, diff):
    """Each part of a diff: the lines that stay or go must be in the file once, one after the other."""
    for part in re.split(r"^--- ", diff, flags=re.MULTILINE)[1:]:
        name, *lines = part.splitlines()
        path = folder / name
        before, after = ("".join(f"{line[1:]}\n" for line in lines if line[0] in kept) for kept in (" -", " +"))
        assert path.read_text().count(before) == 1, (name, before)
        path.write_text(path.read_text().replace(before, after))


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tree")
    shutil.copytree(ROOT / "csrc", folder / "csrc")
    (folder / "tests" / "unit" / "collective").mkdir(parents=True)
    for language, text in BLOCKS:
        if language == "diff":
            apply(folder, text)
        elif language == "cpp":
            path = folder / re.match(r"// (\S+)\n", text)[1]
            assert not path.exists()
            path.write_text(text.partition("\n")[2])
    return folder


def has_googletest():
    try:
        return subprocess.run([*COMPILER[:2], "-E", "-x", "c++", "-"], input=b"#include <gtest/gtest.h>", cwd=ROOT,
                              stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(not has_googletest(), reason="missing: a C++ compiler and GoogleTest")
def test_the_codec_of_the_page(tree):
    def compiled(name):
        output = str(tree / f"{Path(name).stem}.o")
        subprocess.run([*COMPILER, "-c", name, "-o", output], cwd=tree, check=True)
        return output

    names = [f"csrc/{source}" for source in SOURCES] + ["tests/unit/collective/sign_codec_test.cc"]
    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compiled, names))
    subprocess.run([*COMPILER, *objects, "-lgtest", "-lgtest_main", "-o", "codec_tests"], cwd=tree, check=True)
    said = subprocess.run([tree / "codec_tests"], check=True, stdout=subprocess.PIPE, text=True).stdout
    assert "[  PASSED  ] 4 tests." in said


def test_the_compressor_of_the_page():
    (program,) = [text for language, text in BLOCKS if language == "python"]
    names = {}
    exec(program, names)
    compressor = names["Sign"]()
    assert compressor.kind == 3 and compressor.is_compressed("weight", (64, 64), "float32")
