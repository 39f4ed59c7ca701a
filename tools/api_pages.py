"""The API reference as Markdown, made from docstrings and from the comments of C headers. Nothing is imported or
compiled: Python is read by ast, so neither a framework nor the core must be there.

`MODULES` lists what is public. A name may be defined anywhere in the package: `find` follows imports to where it is.
"""
import ast
import functools
import inspect
import re
from pathlib import Path
from typing import Dict, Iterator, List, NamedTuple, Optional, Tuple

ROOT = Path(__file__).resolve().parent.parent

MODULES = {  # module: what a reader finds there
    "lightcc": "Starting jobs from Python, and what the engine has learned.",
    "lightcc.torch": "PyTorch: `import lightcc.torch as hvd`.",
    "lightcc.torch.amp": "Mixed precision that switches, with PyTorch.",
    "lightcc.torch.elastic": "Elastic training with PyTorch.",
    "lightcc.torch.ddp": "The communication hook for DistributedDataParallel.",
    "lightcc.torch.accelerate": "Accelerate, and the Trainer of Transformers, over lightcc.",
    "lightcc.torch.lightning": "The strategy for PyTorch Lightning.",
    "lightcc.torch.process_group": "The backend `lightcc` of `torch.distributed`.",
    "lightcc.tensorflow": "TensorFlow: `import lightcc.tensorflow as hvd`.",
    "lightcc.tensorflow.amp": "Mixed precision that switches, in own loops of TensorFlow.",
    "lightcc.tensorflow.elastic": "Elastic training with TensorFlow.",
    "lightcc.tensorflow.keras": "`tf.keras`: `import lightcc.tensorflow.keras as hvd`.",
    "lightcc.tensorflow.keras.callbacks": "Callbacks for `tf.keras`.",
    "lightcc.tensorflow.keras.elastic": "Elastic training with `tf.keras`.",
    "lightcc.keras": "Keras by itself: `import lightcc.keras as hvd`.",
    "lightcc.keras.callbacks": "Callbacks for Keras.",
    "lightcc.keras.elastic": "Elastic training with Keras.",
    "lightcc.jax": "JAX's own collectives over lightcc.",
    "lightcc.amp": "Policies of mixed precision, for all frameworks.",
    "lightcc.numpy": "NumPy and CuPy arrays: `import lightcc.numpy as hvd`.",
    "lightcc.common.elastic": "What the elastic packages of all frameworks share.",
    "lightcc.data": "Data loaders that fetch ahead.",
    "lightcc.explain": "The cost model behind `lightcc-explain`.",
}
HEADERS = {"csrc/api/lightcc.h": "lightcc's C API.", "harp_plugin/harp.h": "HARP's C API."}


class Found(NamedTuple):
    """Where a name is defined: the module, and the statement; or the module alone, if the name is one."""
    module: str
    node: Optional[ast.AST]
    name: str


# Where names are defined

def path_of(module: str) -> Optional[Path]:
    stem = ROOT.joinpath(*module.split("."))
    return next((path for path in (stem.with_suffix(".py"), stem / "__init__.py") if path.is_file()), None)


@functools.lru_cache(maxsize=None)
def tree_of(module: str) -> ast.Module:
    path = path_of(module)
    if path is None:
        raise LookupError(f"there is no module {module}: correct MODULES in tools/api_pages.py")
    return ast.parse(path.read_text(), str(path))


def statements(body: List[ast.stmt]) -> Iterator[ast.stmt]:
    """Those of a module, and inside its conditions, of which the first that defines a name counts."""
    for node in body:
        yield node
        for part in ("body", "orelse", "handlers"):
            if isinstance(node, (ast.If, ast.Try)):
                yield from statements(getattr(node, part, []))


@functools.lru_cache(maxsize=None)
def find(module: str, name: str) -> Optional[Found]:
    if path_of(f"{module}.{name}"):
        return Found(f"{module}.{name}", None, name)
    tree = tree_of(module)
    for node in statements(tree.body):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name:
            return Found(module, node, name)
        if isinstance(node, ast.ImportFrom):
            found = _imported(node, name)
            if found:
                return found
        if isinstance(node, ast.Assign):
            for target, value in _assigned(node):
                if target == name:
                    return _value(module, value, node, name)
    # What __getattr__ imports when it is asked for.
    late = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    return next(filter(None, (_imported(node, name) for node in late)), None)


def _imported(node: ast.ImportFrom, name: str) -> Optional[Found]:
    if not (node.module or "").startswith("lightcc"):
        return None
    for alias in node.names:
        if (alias.asname or alias.name) == name:
            return find(node.module, alias.name)
        if alias.name == "*" and name in names_of(node.module):
            return find(node.module, name)
    return None


def _assigned(node: ast.Assign) -> Iterator[Tuple[str, Optional[ast.expr]]]:
    for target in node.targets:
        if isinstance(target, ast.Name):
            yield target.id, node.value
        elif isinstance(target, ast.Tuple):
            values = node.value.elts if isinstance(node.value, ast.Tuple) else [None] * len(target.elts)
            yield from ((each.id, value) for each, value in zip(target.elts, values) if isinstance(each, ast.Name))


def _value(module: str, value: Optional[ast.expr], node: ast.Assign, name: str) -> Optional[Found]:
    if isinstance(value, ast.Name):
        return find(module, value.id) or Found(module, node, name)
    if isinstance(value, ast.Attribute) and isinstance(value.value, ast.Name):
        return _member(module, value.value.id, value.attr) or Found(module, node, name)
    return _made(name) if value is None else Found(module, node, name)


def _member(module: str, owner: str, name: str) -> Optional[Found]:
    """`owner.name` in a module: a module's name, a class's, or that of an object that the module has made."""
    found = find(module, owner)
    if found and found.node is None:
        return find(found.module, name)
    if found and isinstance(found.node, ast.Assign) and isinstance(found.node.value, ast.Call):
        found = find(found.module, ast.unparse(found.node.value.func))
    if found and isinstance(found.node, ast.ClassDef):
        for node in found.node.body:
            if isinstance(node, ast.FunctionDef) and node.name == name:
                return Found(found.module, node, name)
    return None


@functools.lru_cache(maxsize=None)
def _made(name: str) -> Optional[Found]:
    """A class that a function of the package makes for a framework."""
    for path in sorted((ROOT / "lightcc").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).replace(".__init__", "")
        for node in ast.walk(tree_of(module)):
            if isinstance(node, ast.ClassDef) and node.name == name:
                return Found(module, node, name)
    return None


def described(module: str, node: ast.AST) -> Tuple[str, List[ast.stmt]]:
    """The docstring and the body of a class; of one without docstring, those of the class that it extends."""
    text = None if isinstance(node, ast.Assign) else ast.get_docstring(node)
    for base in [] if text or not isinstance(node, ast.ClassDef) else node.bases:
        owner, _, name = ast.unparse(base).rpartition(".")
        found = _member_class(module, owner, name) if owner else find(module, name)
        if found and isinstance(found.node, ast.ClassDef):
            return described(found.module, found.node)
    return text or "", getattr(node, "body", [])


def _member_class(module: str, owner: str, name: str) -> Optional[Found]:
    found = find(module, owner)
    return find(found.module, name) if found and found.node is None else None


@functools.lru_cache(maxsize=None)
def names_of(module: str) -> Tuple[str, ...]:
    """`__all__`, or what the module itself defines."""
    own: Dict[str, None] = {}
    listed: List[str] = []
    for node in tree_of(module).body:
        if isinstance(node, (ast.Assign, ast.AugAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            listed += _listed(module, node.value) if ast.unparse(targets[0]) == "__all__" else []
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            own[node.name] = None
        elif isinstance(node, ast.Assign):
            own.update(dict.fromkeys(name for name, _ in _assigned(node)))
    return tuple(listed) or tuple(name for name in own if not name.startswith("_"))


def _listed(module: str, value: ast.expr) -> List[str]:
    if isinstance(value, (ast.List, ast.Tuple)):
        return [ast.literal_eval(element) for element in value.elts]
    if isinstance(value, ast.Attribute) and value.attr == "__all__":  # of another module, _ops.__all__
        found = find(module, ast.unparse(value.value))
        if found and found.node is None:
            return list(names_of(found.module))
    raise LookupError(f"{module}: cannot read __all__")


# Pages

def module_page(module: str) -> str:
    """One public module: its docstring, and each of its names."""
    out = [f"# {module}", "", *prose(ast.get_docstring(tree_of(module)) or "")]
    constants = []
    for name in sorted(names_of(module), key=str.lower):
        found = find(module, name)
        if found is None:
            raise LookupError(f"{module}.{name} is in __all__, and defined nowhere")
        if found.node is None:
            where = f"[`{found.module}`]({found.module}.md)" if found.module in MODULES else f"`{found.module}`"
            out += ["", f"## {name}", "", f"The module {where}."]
        elif isinstance(found.node, ast.Assign):
            constants.append(name)
        else:
            out += ["", *_definition(name, found)]
    if constants:
        out += ["", "## Constants", "", ", ".join(f"`{name}`" for name in constants)]
    return "\n".join(out) + "\n"


def _definition(name: str, found: Found) -> List[str]:
    node = found.node
    text, body = described(found.module, node)
    if isinstance(node, ast.FunctionDef):
        return [f"## {name}", "", *_signature(name, node), "", *prose(text)]
    init = next((each for each in [*node.body, *body] if isinstance(each, ast.FunctionDef) and each.name == "__init__"),
                None)
    signature = _signature(f"class {name}", init) if init else ["```python", f"class {name}", "```"]
    out = [f"## {name}", "", *signature, "", *prose(text)]
    for method in body:
        if isinstance(method, ast.FunctionDef) and not method.name.startswith("_") and ast.get_docstring(method):
            out += ["", f"### {name}.{method.name}", "", *_signature(method.name, method), "",
                    *prose(ast.get_docstring(method))]
    return out


def _signature(name: str, node: ast.FunctionDef) -> List[str]:
    """As code, an argument a line where it is long."""
    own = {ast.unparse(decorator) for decorator in node.decorator_list}
    arguments = ast.parse(ast.unparse(node)).body[0].args
    if "staticmethod" not in own and arguments.args and arguments.args[0].arg in ("self", "cls"):
        del arguments.args[0]
    if "property" in own:
        return ["```python", name, "```"]
    result = f" -> {ast.unparse(node.returns)}" if node.returns and node.name != "__init__" else ""
    line = f"{name}({ast.unparse(arguments)}){result}"
    if len(line) > 88:
        parts = re.split(r", (?=[\w*]+(?::|=|,|$))(?![^\[(]*[\])])", ast.unparse(arguments))
        line = f"{name}(\n    " + ",\n    ".join(parts) + f",\n){result}"
    return ["```python", line, "```"]


def prose(text: str) -> List[str]:
    """A docstring as Markdown: examples become code, and a page's path a link."""
    out: List[str] = []
    inside = False
    for line in inspect.cleandoc(text).splitlines():
        starts = line.lstrip().startswith(">>>")
        if starts and not inside:
            out += ["", "```pycon"]
            inside = True
        elif inside and not line.strip():
            out.append("```")
            inside = False
        out.append(line if inside else linked(line))
    return out + ["```"] if inside else out


def linked(line: str) -> str:
    code = line.startswith("    ")
    line = line if code else re.sub(r"<(?=\w)", "&lt;", line).replace("*", r"\*").replace("__", r"\_\_")
    return re.sub(r"\bdocs/(\w+)\.md\b", r"[\1](../\1.md)", line)


def header_page(header: str) -> str:
    """A C header: its comments as text, its declarations as code under their names."""
    out = [f"# {Path(header).name}", ""]
    for comment, code in _blocks((ROOT / header).read_text()):
        names = list(dict.fromkeys(first or second for first, second in DECLARED.findall(code)))
        if names:
            out += [f"## {', '.join(names[:3])}{' …' * (len(names) > 3)}", ""]
        out += [*_paragraphs(comment), ""]
        if code:
            out += ["```c", code, "```", ""]
    return "\n".join(out)


DECLARED = re.compile(r"\b((?:lightcc|harp)_\w+)(?=\()|^(?:typedef struct|enum) (\w+)", re.MULTILINE)
GUARD = re.compile(r"#\s*(if|ifn?def|endif|include|pragma|define (LIGHTCC_H|HARP_H|LIGHTCC_API)\b)|extern \"C\"|}$")


def _blocks(text: str) -> Iterator[Tuple[str, str]]:
    """(comment, what it describes): a comment at the beginning of a line opens a block, and so does an empty line."""
    comment: List[str] = []
    code: List[str] = []
    inside = False
    for line in text.splitlines():
        if not inside and (line.startswith("/*") or not line.strip()) and code and not _open("\n".join(code)):
            yield "\n".join(comment), "\n".join(code)
            comment, code = [], []
        if inside or line.startswith("/*"):
            inside = not line.rstrip().endswith("*/")
            comment.append(re.sub(r"^(/\*| \*(?!/)) ?", "", line).replace("*/", "").rstrip())
            if not inside:
                comment.append("")
        elif line.strip() and not (GUARD.match(line) and not _open("\n".join(code))):
            code.append(line)
    if comment or code:
        yield "\n".join(comment), "\n".join(code)


def _open(code: str) -> bool:
    """Inside a struct or an enum."""
    return code.count("{") > code.count("}")


def _paragraphs(comment: str) -> List[str]:
    """Indented lines are a list of names or a drawing: they stay as they are."""
    out: List[str] = []
    fenced = False
    for line in comment.splitlines():
        if line.startswith("  ") != fenced and (line.strip() or fenced):
            out += ["```text"] if not fenced else ["```", ""]
            fenced = not fenced
        out.append(line[2:] if fenced else linked(line.strip()))
    return out + ["```"] if fenced else out
