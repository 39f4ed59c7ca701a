"""Shows that the guards catch what they are for: plants one fault for each in a copy of the tree and expects an alarm.

The copy keeps of the core only what the faults need, so the project's own CMakeLists.txt builds it in seconds.
"""
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = ROOT / ".venv" / "bin"
FUZZ_SECONDS = 20
FUZZ_SEED = 1

HEAP_OVERFLOW = """
#include <gtest/gtest.h>
#include <memory>
TEST(Planted, HeapOverflow) {
  volatile int beyond = 4;
  std::unique_ptr<int[]> four(new int[4]());
  EXPECT_EQ(four[beyond], 0);
}
"""
UNDEFINED_IN_CORE = "namespace lightcc { int successor(int x) { return x + 1; } }\n"
UNDEFINED = """
#include <gtest/gtest.h>
namespace lightcc { int successor(int); }
TEST(Planted, SignedOverflow) {
  volatile int largest = 0x7fffffff;
  EXPECT_LT(lightcc::successor(largest), 0);
}
"""
DATA_RACE = """
#include <gtest/gtest.h>
#include <thread>
TEST(Planted, DataRace) {
  int shared = 0;
  auto count = [&] { for (int i = 0; i < 100000; ++i) ++shared; };
  std::thread one(count), two(count);
  one.join();
  two.join();
}
"""
# The check that every read of a control message goes through.
WIRE_CHECK = "if (n > bytes_.size()) fail();"


def run(command: list, **environment: str) -> tuple[int, str]:
    done = subprocess.run(
        [str(c) for c in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, **environment},
    )
    return done.returncode, done.stdout


def expect_alarm(fault: str, command: list, alarm: str) -> None:
    """The command must fail, and for the right reason: a build that is broken is no alarm."""
    status, output = run(command)
    if status == 0 or alarm not in output:
        sys.exit(f"{output}\nplanted: {fault} was NOT reported (exit {status}, '{alarm}' expected)")
    print(f"planted: {fault}: caught ('{alarm}')", flush=True)


def build(tree: Path, sanitizer: str, target: str) -> Path:
    folder = tree / "build" / sanitizer
    configure = [BIN / "cmake", "-G", "Ninja", "-S", tree, "-B", folder, f"-DCMAKE_MAKE_PROGRAM={BIN / 'ninja'}"]
    configure += ["-DLIGHTCC_TESTS=ON", f"-DLIGHTCC_SANITIZE={sanitizer}"]
    for command in (configure, [BIN / "cmake", "--build", folder, "--target", target, "--parallel", "2"]):
        status, output = run(command)
        if status != 0:
            sys.exit(f"{output}\nplanted: the copy does not build")
    return folder / target


def copy_small_tree(tree: Path) -> None:
    """All headers; of the sources only csrc/base, csrc/nccl_abi, the control messages and their fuzz target."""
    for name in ("CMakeLists.txt", "lightcc/_version.py", "tests/main.cc", "tests/labels.h"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tree / name)
    shutil.copytree(ROOT / "csrc", tree / "csrc")
    shutil.copytree(ROOT / "harp_plugin", tree / "harp_plugin")
    for tests in ("tests/fuzz", "tests/harp", "tests/unit/doubles"):
        shutil.copytree(ROOT / tests, tree / tests, ignore=shutil.ignore_patterns("cuda_*", "nccl_*"))
    for source in (tree / "csrc").rglob("*.cc"):
        if source.parent.name not in ("base", "nccl_abi") and source.stem != "message":
            source.unlink()
    (tree / "csrc" / "api" / "mpiabi" / "other_names.txt").write_text("")  # what is made of it needs the C API


def plant_test(tree: Path, source: str) -> None:
    folder = tree / "tests" / "unit"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "planted_test.cc").write_text(source)


def check_layers(tree: Path) -> None:
    command = [sys.executable, ROOT / ".ci" / "layers.py", tree]
    status, output = run(command)
    if status != 0:
        sys.exit(f"{output}\nplanted: the layer check fails without a fault")
    header = tree / "csrc" / "base" / "types.h"
    clean = header.read_text()
    header.write_text(clean + '#include "engine/engine.h"\n')
    expect_alarm("an upward include", command, 'layer base may not include "engine/engine.h"')
    header.write_text(clean)
    for knows, known in (("net/tcp/tcp_stream.h", "net/loop/loop.h"), ("engine/engine.h", "net/tcp/tcp_stream.h"),
                         ("engine/negotiate/control/tree.h", "engine/engine.h")):
        planted = tree / "csrc" / knows
        whole = planted.read_text()
        planted.write_text(whole + f'#include "{known}"\n')
        expect_alarm(f"{knows} that includes {known}", command, f'this folder may not include "{known}"')
        planted.write_text(whole)
    header.write_text(clean + 'inline const char* knob = std::getenv("LIGHTCC_KNOB");\n')
    expect_alarm("a knob read outside config", command, "the environment is read in")
    header.write_text(clean)
    for planted, more, alarm in (
        (header, "class Wide {\n" + "".join(f"  int field{i}_ = 0;\n" for i in range(25)) + "};\n",
         "Wide has 25 fields; 24 at most"),
        (tree / "csrc" / "engine" / "engine.h", '#include "engine/negotiate/group_engine.h"\n',
         "other headers along; 15 at most"),
    ):
        whole = planted.read_text()
        planted.write_text(whole + more)
        expect_alarm(f"{planted.name} with too much in it", command, alarm)
        planted.write_text(whole)
    planted_files = [tree / "csrc" / "engine" / name for name in ("engine.cc", "planted.h")]
    for planted in planted_files:
        planted.touch()
    expect_alarm("a file beside the engine's facade and folders", command, "csrc/engine: has 9 entries; 8 at most")
    for planted in planted_files:
        planted.unlink()
    check_harp_layers(tree, command)
    module = tree / "lightcc" / "planted.py"
    module.write_text("import torch\n")
    expect_alarm("torch in the framework-free part", command, "torch may be imported in")
    module.write_text('import ctypes\n\nctypes.CDLL("_lightcc.so")\n')
    expect_alarm("a second way into C", command, "C is reached through")
    module.unlink()
    core = tree / "lightcc" / "core"
    core.mkdir()
    module, other = core / "planted.py", core / "planted_too.py"
    module.write_text("from lightcc.core import planted_too\n")
    other.write_text("from lightcc.core.planted import __name__\n")
    expect_alarm("two modules that import each other", command, "a circle of imports: lightcc.core.planted, ")
    other.unlink()
    module.write_text("def late():\n    from lightcc.launch import hosts\n    return hosts\n")
    expect_alarm("a late import upwards", command, "core may not import launch")
    module.unlink()
    front = tree / "lightcc" / "common" / "util.py"
    front.parent.mkdir()
    front.write_text("def planted():\n    pass\n")
    expect_alarm("a function among Horovod's names", command, "planted is defined among Horovod's names")
    front.unlink()


def check_types(tree: Path) -> None:
    core = tree / "lightcc" / "core"
    for package in (core.parent, core):
        (package / "__init__.py").touch()
    module = core / "planted.py"
    command = [BIN / "mypy", "--config-file", ROOT / "pyproject.toml", "--cache-dir", tree / "mypy", module]
    module.write_text("import re\n\n\ndef planted(word: str) -> str:\n    return re.match(word, word).group()\n")
    expect_alarm("a value that may be None", command, 'Item "None" of "Optional[Match[str]]" has no attribute')
    module.write_text("def planted(word):\n    return word\n")
    expect_alarm("a function without types in the core", command, "Function is missing a type annotation")
    module.unlink()


def check_harp_layers(tree: Path, command: list) -> None:
    for knows, line, alarm in (
        ("core/packet.h", '#include "harp_plugin/port/port.h"', "HARP's core may not include"),
        ("port/udp.h", '#include "harp_plugin/core/endpoint.h"', "HARP's port may not include"),
        ("engine/engine.h", '#include "net/link.h"', 'HARP\'s engine may not include "net/link.h"'),
        ("engine/engine.h", 'inline const char* knob = std::getenv("HARP_KNOB");', "HARP's environment is read in"),
        ("engine/engine.h", "inline std::mutex everyones;", "data passes no mutex"),
        ("core/events.h", "struct Owner { virtual void completed() = 0; };", "HARP's core has no virtual functions"),
    ):
        planted = tree / "harp_plugin" / knows
        whole = planted.read_text()
        planted.write_text(f"{whole}{line}\n")
        expect_alarm(f"in HARP's {knows}: {line}", command, alarm)
        planted.write_text(whole)
    header = tree / "csrc" / "net" / "link.h"
    whole = header.read_text()
    header.write_text(whole + '#include "harp_plugin/core/endpoint.h"\n')
    expect_alarm("lightcc's core that knows HARP's inside", command, 'may not include "harp_plugin/core/endpoint.h"')
    header.write_text(whole)


def check_sanitizers(tree: Path) -> None:
    plant_test(tree, HEAP_OVERFLOW)
    expect_alarm("a heap overflow", [build(tree, "address", "unit_tests")], "heap-buffer-overflow")
    core = tree / "csrc" / "base" / "planted.cc"
    core.write_text(UNDEFINED_IN_CORE)
    plant_test(tree, UNDEFINED)
    expect_alarm("a signed overflow in the core", [build(tree, "address", "unit_tests")], "signed integer overflow")
    core.unlink()
    plant_test(tree, DATA_RACE)
    no_aslr = ["setarch", "-R"] if run(["setarch", "-R", "true"])[0] == 0 else []
    expect_alarm("a data race", [*no_aslr, build(tree, "thread", "unit_tests")], "data race")


def check_fuzzer(tree: Path) -> None:
    wire = tree / "csrc" / "base" / "wire.h"
    clean = wire.read_text()
    if clean.count(WIRE_CHECK) != 1:
        sys.exit(f"planted: csrc/base/wire.h has no single '{WIRE_CHECK}' to take out; mend WIRE_CHECK here")
    wire.write_text(clean.replace(WIRE_CHECK, "if (n > bytes_.size()) n = bytes_.size();"))
    command = [build(tree, "address", "message_fuzz"), f"-max_total_time={FUZZ_SECONDS}", f"-seed={FUZZ_SEED}"]
    command.append(f"-artifact_prefix={tree}/")
    corpus = tree / "tests" / "fuzz" / "corpus" / "message_fuzz"
    expect_alarm("an unchecked read of a message", command + ([corpus] if corpus.is_dir() else []), "AddressSanitizer")
    replay = [command[0], tree / "crash-message_fuzz"]
    expect_alarm("the input that the fuzzer kept", replay, "AddressSanitizer")


def check_passed(tree: Path) -> None:
    """A stage that has passed is run again after any change of what it reads, and not after one of what it does not."""
    command = [sys.executable, ROOT / ".ci" / "passed.py"]
    here = {"LIGHTCC_CI_ROOT": str(tree), "XDG_CACHE_HOME": str(tree / "cache")}
    (tree / "docs").mkdir()
    (tree / "docs" / "page.md").write_text("A page.\n")
    for git in (["init", "-q"], ["add", "csrc", "docs"]):
        run(["git", "-C", tree, *git])
    run([*command, "keep", "sanitize", "3 passed"], **here)
    (tree / "docs" / "page.md").write_text("Another page.\n")
    if run([*command, "show", "sanitize"], **here)[0] != 0:
        sys.exit("planted: a stage that has passed is run again after a change of what it does not read")
    header = tree / "csrc" / "base" / "types.h"
    clean = header.read_text()
    for what, environment, text in (("a changed header", {}, clean + "\n"),
                                    ("another option of the compiler", {"CXXFLAGS": "-O0"}, clean)):
        header.write_text(text)
        if run([*command, "show", "sanitize"], **here, **environment)[0] == 0:
            sys.exit(f"planted: {what}, and the stage is NOT run again")
        print(f"planted: {what}: the stage is run again", flush=True)
    header.write_text(clean)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        copy_small_tree(tree)
        check_layers(tree)
        check_types(tree)
        check_passed(tree)
        check_sanitizers(tree)
        check_fuzzer(tree)


if __name__ == "__main__":
    main()
