""".ci/vocabulary.py finds C++ types of one name, and words of docs/vocabulary.md that the code lacks."""
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CODE = """namespace lightcc {
// struct Comment { };
class Alone final : public Base { struct Entry { int x; }; enum class Kind { a, b }; };
struct Other { struct Entry { int y; }; };  // inside two classes: no offence
%s
}  // namespace lightcc
"""


def offences(folder, code="", page=""):
    (folder / "csrc" / "net").mkdir(parents=True, exist_ok=True)
    (folder / "docs").mkdir(exist_ok=True)
    (folder / "csrc" / "net" / "one.h").write_text(CODE % "struct Doorbell {}; namespace { struct Pair { int i; }; }")
    (folder / "csrc" / "two.cc").write_text(CODE.replace("Alone", "Second").replace("Other", "Third") % code)
    (folder / "docs" / "vocabulary.md").write_text(f"| word | meaning | in the code |\n| --- | --- | --- |\n{page}")
    command = [sys.executable, ROOT / ".ci" / "vocabulary.py", folder]
    said = subprocess.run(command, stderr=subprocess.PIPE, text=True).stderr
    return [line.removeprefix("vocabulary: ") for line in said.splitlines()]


def test_a_name_is_used_once(tmp_path):
    assert offences(tmp_path) == []
    (found,) = offences(tmp_path, "namespace harp { class Alone : Other<int> { int i; }; }")
    assert found.startswith("type Alone of lightcc, lightcc::harp: each has a name of its own; find one that says more")
    (found,) = offences(tmp_path, "struct Holder { struct Alone { int i; }; };")
    assert found.startswith("type Alone of lightcc, lightcc::Holder:")
    (found,) = offences(tmp_path, "namespace { enum class Alone { yes }; }")
    assert found.startswith("type Alone of lightcc, lightcc::(unnamed) in two.cc:")
    (found,) = offences(tmp_path, "struct Entry { int i; };")
    assert found.startswith("type Entry of lightcc, lightcc::Alone, lightcc::Other, lightcc::Second, lightcc::Third:")
    other_library = ("}\nnamespace harp { class Alone { int i; }; namespace tool { class Tool { int i; }; } }\n"
                     "namespace lightcc {")
    assert offences(tmp_path, other_library) == []
    (found,) = offences(tmp_path, other_library.replace("class Tool", "class Alone"))
    assert found.startswith("type Alone of harp, harp::tool:")
    assert offences(tmp_path, 'struct New; class Alone; const char* text = "struct Alone {";') == []


def test_the_page_says_what_is_there(tmp_path):
    assert offences(tmp_path, page="| bell | wakes | `Doorbell` in `net/one.h` |\n") == []
    assert offences(tmp_path, page="| bell | wakes | `Bell` in `net/one.h` |\n| bell | rings | `net/no.h` |\n") == [
        "docs/vocabulary.md: bell: Bell is not in the file", "docs/vocabulary.md: bell is explained twice",
        "docs/vocabulary.md: bell: there is no net/no.h"]
