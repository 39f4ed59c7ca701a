"""Checks who may know whom (docs/design.md): C++ includes, Python imports, late ones too, and that they form no
circle; how much certain headers bring along, how many entries a folder and how many fields a class has; who reads the
environment; and that HARP's data passes no mutex, and its core and engine call nobody above them.

Prints one line per offence and exits 1 if there is any. With an argument, checks the tree at that path.
"""
import ast
import re
import sys
from pathlib import Path
from typing import Tuple

# A layer may include itself and these.
MAY_INCLUDE = {
    "base": set(),
    "nccl_abi": {"base"},
    "device": {"base"},
    "net": {"base", "nccl_abi"},
    "collective": {"base", "device", "net"},
    "engine": {"base", "device", "net", "collective"},
    "api": {"base", "device", "net", "collective", "engine"},
    "embedding": {"base"},
}
# What a layer, or a folder of one, may include of a layer that it does not know: the C API, and what all operations for
# TensorFlow share.
MAY_INCLUDE_FILE = {("embedding", "api/lightcc.h"), ("embedding/tensorflow", "api/tensorflow/c_api.h"),
                    ("embedding/tensorflow", "api/tensorflow/kernel.h"),
                    ("embedding/tensorflow", "api/tensorflow/operation.h")}
# Folders inside a layer that not everyone may include, and who may beside themselves. No transport includes another,
# and bootstrap alone knows which there are. (peers.h, in net itself, knows shared memory and heartbeats.)
FOLDERS = {
    "net/loop": set(),
    "net/shm": {"net", "net/health", "net/bootstrap", "collective", "engine", "engine/run"},
    "net/tcp": {"net/bootstrap"},
    "net/harp": {"net/bootstrap"},
    "net/plugin": {"net/bootstrap"},
    "net/health": {"net", "net/bootstrap", "engine", "engine/lifecycle"},
    "net/bootstrap": {"engine", "engine/lifecycle", "api"},
    "engine/request": {"engine", "engine/loop", "engine/run", "engine/negotiate", "engine/lifecycle", "api"},
    "engine/timeline": {"engine", "engine/request", "engine/run", "engine/negotiate", "engine/lifecycle", "api"},
    "engine/run": {"engine", "engine/negotiate"},
    "engine/negotiate/control": {"engine", "engine/loop", "engine/request", "engine/run", "engine/negotiate",
                                 "engine/lifecycle"},
    "engine/negotiate": {"engine", "engine/lifecycle"},
    "engine/lifecycle": {"engine", "engine/request", "engine/negotiate", "api"},
    "engine/loop": {"engine", "engine/negotiate", "engine/lifecycle"},
    "api/mpiabi": set(),
    "embedding/tensorflow": set(),
}
# Folders that see less than their layer. Control decides, and does no I/O but over links; JAX's library stands on the C
# API alone.
MAY_INCLUDE_ONLY = {
    "engine/negotiate/control": {"base", "net", "engine/negotiate/control"},
    "api/mpiabi": {"base", "api/mpiabi", "api/lightcc.h"},
}
# Headers that others stand on, and how many headers of this project each may bring along.
MOST_HEADERS_BEHIND = {"api/global_state.h": 20, "engine/engine.h": 15, "engine/request/effects.h": 20,
                       "engine/negotiate/surroundings.h": 15, "engine/request/request.h": 15, "net/peers.h": 20,
                       "collective/collective.h": 15}
# A folder that is made of folders, and how many entries it has at most.
MOST_ENTRIES = {"engine": 8}
# A class has at most so many fields (their names end with an underscore). These have more, and get no more.
MOST_FIELDS = 24
MOST_FIELDS_OF = {"TopKSelection": 32, "TcpStream": 26}
# HARP's layers, and single files that a layer may include beside them; below them HARP_STANDS_ON. Nobody in csrc may
# include anything of HARP but its C API.
HARP_MAY_INCLUDE = {
    "core": {"core"},
    "port": {"port", "core/options.h", "core/packet.h", "core/expected.h"},
    "engine": {"core", "port", "engine"},
    "daemon": {"port", "daemon"},
    "api": {"core", "port", "engine", "api", "harp.h"},
    "nccl": {"nccl", "api", "harp.h", "port/interfaces.h", "engine/control.h", "engine/fork.h"},
    "tools": {"tools", "daemon", "api", "harp.h"},
}
HARP_STANDS_ON = ("base/", "nccl_abi/")
HARP_MAY_READ_ENVIRONMENT = "harp_plugin/api/config.cc"
# HARP's core and engine call nobody above them: what they have to say are values (core/events.h).
HARP_MAY_NOT_CALL_UPWARDS = ("harp_plugin/core/", "harp_plugin/engine/")
# Data passes no mutex: these are for opening, closing and counting.
HARP_MAY_LOCK = ("harp_plugin/api/", "harp_plugin/engine/control.", "harp_plugin/port/mem.cc", "harp_plugin/tools/")
MAY_READ_ENVIRONMENT = ("csrc/base/config.cc", "csrc/net/bootstrap/world.cc", "csrc/api/")

# A part of the Python package, which is a folder of lightcc or a module beside them, may import itself and these.
# Fronts stand on core and compress, each on its own framework; lightccrun and run() on launch and elastic.
MAY_USE = {
    "core": set(),
    "compress": {"core"},
    "launch": {"core", "_version"},
    "elastic": {"core", "launch"},
    "numpy": {"core"},
    "amp": {"core"},
    "embedding": {"core"},
    "periodic": {"core", "compress"},
    "torch": {"core", "compress", "embedding", "_torch_backend", "torch.store_meeting"},
    "torch.store_meeting": {"core", "launch", "_torch_backend"},  # torch has placed the ranks, as schedulers do
    "torch.amp": {"core", "amp", "torch"},
    "_torch_backend": {"torch"},  # where PyTorch looks for backends, before it is asked for one
    "tensorflow": {"core", "compress", "periodic"},
    "tensorflow.amp": {"core", "amp", "tensorflow"},
    "tensorflow.elastic": {"core", "tensorflow", "_keras"},
    "tensorflow.embedding": {"core", "embedding", "tensorflow", "tensorflow.elastic"},
    "tensorflow.kv_variable": {"core", "embedding", "tensorflow", "tensorflow.embedding"},
    "_keras": {"core", "compress", "periodic", "numpy", "torch", "tensorflow"},
    "_keras.amp": {"core", "amp", "_keras"},
    "_keras.embedding": {"core", "compress", "embedding", "tensorflow", "tensorflow.embedding", "_keras"},
    "tensorflow.keras": {"core", "compress", "_keras", "_keras.amp", "tensorflow", "tensorflow.elastic"},
    "tensorflow.keras.embedding": {"embedding", "tensorflow.embedding", "_keras.embedding"},
    "keras": {"core", "compress", "_keras", "_keras.amp", "torch", "tensorflow", "tensorflow.elastic"},
    "keras.embedding": {"embedding", "tensorflow.embedding", "_keras.embedding"},
    "jax": {"core", "launch"},
    "jax_path": {"jax"},
    "explain": {"core"},
    "data": {"core"},
    "common": {"core"},
    "runner": {"core", "launch", "elastic", "as_horovod", "_version"},
    "ray": {"core", "launch", "elastic"},
    "spark": {"core", "launch", "elastic", "runner"},
    "as_horovod": {"launch", "install_as_horovod"},
    "install_as_horovod": {"as_horovod", "_version"},
    "horovod_path": {"as_horovod", "__init__"},
    "__main__": {"runner"},
    "__init__": {"core", "runner", "_version"},
    "_version": set(),
}
# Horovod's one DistributedOptimizer takes TensorFlow's own optimizers and Keras's.
MAY_IMPORT_LATE = {("lightcc/tensorflow/optimizer.py", "tensorflow.keras")}
# Horovod's names: what stands here is imported from elsewhere, and nothing is defined.
FRONTS = ("lightcc/common/", "lightcc/runner/elastic/")

# A framework or a scheduler is imported inside these parts of the Python package only.
MAY_IMPORT = {
    "torch": {"torch"},
    "tensorflow": {"tensorflow", "_keras", "keras"},
    "keras": {"tensorflow", "_keras", "keras"},
    "jax": {"jax"},
    "ray": {"ray"},
    "pyspark": {"spark"},
}
MAY_OPEN_LIBRARY = ("lightcc/core/lib.py", "lightcc/core/nccl_library.py", "lightcc/core/nvtx_library.py",
                    "lightcc/embedding/lib.py", "lightcc/launch/nccl_plugin.py",
                    "lightcc/tensorflow/embedding/library.py")

NOT_CODE = re.compile(r"""/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])'""", re.DOTALL)
CLASS = re.compile(r"\b(?:class|struct)\s+([A-Za-z_][\w:]*)(?:\s+final)?\s*(?::[^;{()]*)?\{")
FIELD = re.compile(r"(?<![\w.>])[a-z]\w*_(?=\s*[;,={\[])")
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"')
GETENV = re.compile(r"\b(secure_getenv|getenv|environ)\b")
VIRTUAL = re.compile(r"\bvirtual\b")
LOCK = re.compile(r"\b(\w*mutex|condition_variable\w*|lock_guard|unique_lock|scoped_lock|pthread_(spin|rwlock)\w*)\b")
COMMENT = re.compile(r"//.*")


def cxx_files(top: Path) -> list[Path]:
    return sorted(p for p in top.rglob("*") if p.suffix in {".h", ".cc", ".cu"})


def may_include_folder(folder: str, target: str) -> bool:
    """Between the folders inside layers; both as paths in csrc."""
    header, target = target, target.rpartition("/")[0]
    if folder in MAY_INCLUDE_ONLY:
        return bool({header, target} & MAY_INCLUDE_ONLY[folder])
    return target == folder or target not in FOLDERS or folder in FOLDERS[target]


def cxx_offences(root: Path):
    for path in cxx_files(root / "csrc"):
        layer, name = path.relative_to(root / "csrc").parts[0], path.relative_to(root).as_posix()
        folder = path.parent.relative_to(root / "csrc").as_posix()
        if layer not in MAY_INCLUDE:
            yield f"{name}: '{layer}' is no layer; known: {', '.join(MAY_INCLUDE)}"
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if match := INCLUDE.match(line):
                target = match[1].split("/")[0]
                if path.parent.name == "harp" and match[1] == "harp_plugin/harp.h":
                    continue
                if {(layer, match[1]), (folder, match[1])} & MAY_INCLUDE_FILE:
                    continue
                if target not in MAY_INCLUDE[layer] | {layer} or "/" not in match[1]:
                    yield f'{name}:{number}: layer {layer} may not include "{match[1]}"'
                elif not may_include_folder(folder, match[1]):
                    yield f'{name}:{number}: this folder may not include "{match[1]}"'
            if GETENV.search(COMMENT.sub("", line)) and not name.startswith(MAY_READ_ENVIRONMENT):
                yield f"{name}:{number}: the environment is read in {', '.join(MAY_READ_ENVIRONMENT)} only"


def harp_offences(root: Path):
    plugin = root / "harp_plugin"
    for path in cxx_files(plugin):
        name, layer = path.relative_to(root).as_posix(), path.relative_to(plugin).parts[0]
        if layer not in HARP_MAY_INCLUDE and name != "harp_plugin/harp.h":
            yield f"{name}: '{layer}' is no layer of HARP; known: {', '.join(HARP_MAY_INCLUDE)}"
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            code = COMMENT.sub("", line)
            if match := INCLUDE.match(line):
                own = match[1].removeprefix("harp_plugin/")
                may = HARP_MAY_INCLUDE.get(layer, set())
                is_own = own != match[1] and (own in may or own.split("/")[0] in may)
                if not is_own and not match[1].startswith(HARP_STANDS_ON):
                    yield f'{name}:{number}: HARP\'s {layer} may not include "{match[1]}"'
            if GETENV.search(code) and layer != "tools" and name != HARP_MAY_READ_ENVIRONMENT:
                yield f"{name}:{number}: HARP's environment is read in {HARP_MAY_READ_ENVIRONMENT} only"
            if VIRTUAL.search(code) and name.startswith(HARP_MAY_NOT_CALL_UPWARDS):
                yield f"{name}:{number}: HARP's {layer} has no virtual functions; what it has to say are values"
            if LOCK.search(code) and not name.startswith(HARP_MAY_LOCK):
                yield f"{name}:{number}: data passes no mutex; see HARP_MAY_LOCK"


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name.split(".")[0] for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
        return [node.module.split(".")[0]]
    return []


def opens_library(node: ast.AST) -> bool:
    """CDLL(...) and its like; CDLL(None) is this process's own libc and free to all."""
    if not isinstance(node, ast.Call):
        return False
    called = getattr(node.func, "attr", getattr(node.func, "id", ""))
    itself = [ast.unparse(argument) for argument in node.args[:1]] == ["None"]
    return called in {"CDLL", "PyDLL", "LoadLibrary"} and not itself


def python_offences(root: Path):
    for path in sorted((root / "lightcc").rglob("*.py")):
        name, part = path.relative_to(root).as_posix(), path.relative_to(root / "lightcc").parts[0]
        for node in ast.walk(ast.parse(path.read_text(), name)):
            for module in imported(node):
                if module in MAY_IMPORT and part not in MAY_IMPORT[module]:
                    allowed = ", ".join(f"lightcc/{p}" for p in sorted(MAY_IMPORT[module]))
                    yield f"{name}:{node.lineno}: {module} may be imported in {allowed} only"
            if opens_library(node) and name not in MAY_OPEN_LIBRARY:
                yield f"{name}:{node.lineno}: C is reached through {' and '.join(MAY_OPEN_LIBRARY)} only"


def part_of(module: Tuple[str, ...]) -> str:
    """The part of the Python package in which a module is, or a name of one; given as its path below lightcc."""
    unknown = module[0] if len(module) > 1 else "__init__"
    names = [".".join(module[:length]) for length in range(len(module), 0, -1)]
    return next((part for part in names if part in MAY_USE), unknown)


def part_offences(root: Path):
    package = root / "lightcc"
    for path in sorted(package.rglob("*.py")):
        name, own = path.relative_to(root).as_posix(), path.relative_to(package).with_suffix("").parts
        part = part_of(own)
        if part not in MAY_USE:
            yield f"{name}: '{part}' is no part of the package; known: {', '.join(MAY_USE)}"
            continue
        tree = ast.parse(path.read_text(), name)
        for node in ast.walk(tree):
            for used in {part_of(target) for target in imported_from_lightcc(node)} - {part, *MAY_USE[part]}:
                if (name, used) in MAY_IMPORT_LATE:
                    continue
                yield f"{name}:{node.lineno}: {part} may not import {used}"
        if name.startswith(FRONTS):
            for node in ast.walk(tree):
                if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                    yield f"{name}:{node.lineno}: {node.name} is defined among Horovod's names, which are imported"


def imported_from_lightcc(node: ast.AST) -> list[Tuple[str, ...]]:
    """The modules of lightcc that a statement imports, each as its path below lightcc."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names if alias.name.startswith("lightcc.")]
    elif isinstance(node, ast.ImportFrom) and node.module == "lightcc":
        names = [f"lightcc.{alias.name}" for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lightcc."):
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    else:
        names = []
    return [tuple(name.split(".")[1:]) for name in names]


def imported_at_load(node: ast.AST) -> list[str]:
    """What a module imports as it is imported itself; functions import when they are called."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [name for alias in node.names for name in (f"{node.module}.{alias.name}", node.module or "")]
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        return []
    return [name for child in ast.iter_child_nodes(node) for name in imported_at_load(child)]


def circle_offences(root: Path):
    files = {path.relative_to(root).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__"): path
             for path in (root / "lightcc").rglob("*.py")}
    imports = {}
    for module, path in files.items():
        names = [name for name in imported_at_load(ast.parse(path.read_text())) if name in files and name != module]
        # `from package import module` is about the module; the package itself is always there first.
        imports[module] = {name for name in names if not any(other.startswith(f"{name}.") for other in names)}
    while True:  # what imports none of the others is in no circle, nor what none of the others imports
        targets = set().union(*imports.values())
        free = [module for module in imports if module not in targets or not imports[module] & imports.keys()]
        if not free:
            break
        for module in free:
            del imports[module]
        imports = {module: names & imports.keys() for module, names in imports.items()}
    if imports:
        yield f"lightcc: a circle of imports: {', '.join(sorted(imports))}"


def headers_behind(root: Path, header: Path) -> set[Path]:
    """All headers of this project that come along with one."""
    behind: set[Path] = set()
    open_ends = [header]
    while open_ends:
        for line in open_ends.pop().read_text().splitlines():
            found = INCLUDE.match(line)
            for top in ("csrc", "."):
                target = root / top / found[1] if found else None
                if target and target.exists() and target not in behind:
                    behind.add(target)
                    open_ends.append(target)
    return behind


def entry_offences(root: Path):
    for name, most in MOST_ENTRIES.items():
        count = len(list((root / "csrc" / name).iterdir()))
        if count > most:
            yield f"csrc/{name}: has {count} entries; {most} at most"


def header_offences(root: Path):
    for name, most in MOST_HEADERS_BEHIND.items():
        count = len(headers_behind(root, root / "csrc" / name))
        if count > most:
            yield f"csrc/{name}: brings {count} other headers along; {most} at most"


def fields_of_classes(text: str):
    """(name, number of fields) of each class that is defined."""
    text = NOT_CODE.sub(" ", text)
    for found in CLASS.finditer(text):
        depth, own = 1, []  # own: what is not inside other braces
        for character in text[found.end():]:
            depth += (character == "{") - (character == "}")
            if depth == 0:
                break
            if depth == 1 or (depth == 2 and character == "{"):
                own.append(character)
        yield found[1], len(FIELD.findall("".join(own)))


def field_offences(root: Path):
    for path in cxx_files(root / "csrc"):
        for name, count in fields_of_classes(path.read_text()):
            most = MOST_FIELDS_OF.get(name, MOST_FIELDS)
            if count > most:
                yield f"{path.relative_to(root).as_posix()}: {name} has {count} fields; {most} at most"


def main() -> int:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent.parent).resolve()
    offences = [*cxx_offences(root), *header_offences(root), *entry_offences(root), *field_offences(root),
                *harp_offences(root), *python_offences(root), *part_offences(root), *circle_offences(root)]
    print("\n".join(offences) or "layers: clean")
    return 1 if offences else 0


if __name__ == "__main__":
    sys.exit(main())
