"""Makes `import horovod...` mean lightcc, for scripts that are not to be changed.

    lightccrun --as-horovod -np 2 python train.py
    python -m lightcc.as_horovod train.py arguments   # or any other words that python takes: -m module, -c code
    python -m lightcc.as_horovod --install            # for all of this environment (install_as_horovod.py); --uninstall
    python -m lightcc.as_horovod --install --version 0.27.0  # which calls itself so

horovod.x is the very module lightcc.x; only the top module is one of its own (horovod_path/horovod). A Python process
learns of this from a folder at the head of PYTHONPATH, so children do too, whatever starts them. All of them import
this module as they start: what it needs later it imports later.
"""
from __future__ import annotations

import importlib
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder

HOROVOD_VERSION = "0.28.1"  # whose API this is
FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "horovod_path")

__path__: list[str] = []  # else python -m lightcc.as_horovod would warn where this is loaded since Python's start
INFO = f"horovod-{HOROVOD_VERSION}.dist-info"
INSTALLER = "lightcc"  # in the metadata that --install writes: by this we know our own


def metadata(version: str = HOROVOD_VERSION) -> dict[str, str]:
    """What a package named horovod says of itself, by file."""
    return {
        "METADATA": f"Metadata-Version: 2.1\nName: horovod\nVersion: {version}\nSummary: lightcc, as Horovod\n"
                    "Requires-Dist: lightcc\nProvides-Extra: pytorch\nProvides-Extra: tensorflow\n"
                    "Provides-Extra: keras\n",
        "top_level.txt": "horovod\n",
    }


def infos(folders: list[str]) -> list[str]:
    """The folders with the metadata of an installed package named horovod, ours or not."""
    found = []
    for folder in folders:
        try:
            names = os.listdir(folder or ".")
        except OSError:  # an archive, or nothing
            continue
        found += [os.path.join(folder, name) for name in names
                  if name.startswith("horovod-") and name.endswith(".dist-info")]
    return found


def is_ours(info: str) -> bool:
    """Whether --install has written this metadata."""
    try:
        with open(os.path.join(info, "INSTALLER"), encoding="utf-8", errors="replace") as file:
            return file.read().strip() == INSTALLER
    except OSError:
        return False


def version() -> str:
    """What horovod.__version__ says: the version that --install was told, else that of the API."""
    ours = [os.path.basename(info) for info in infos(sys.path) if is_ours(info)]
    return ours[0][len("horovod-"):-len(".dist-info")] if ours else HOROVOD_VERSION


class _Finder:
    """On sys.meta_path. Finds horovod in our folder and every horovod.x at lightcc.x."""

    said = False

    def find_spec(self, name: str, path=None, target=None) -> ModuleSpec | None:
        if name == "horovod":
            self._mention_real_horovod()
            return PathFinder.find_spec(name, [FOLDER])
        if not name.startswith("horovod."):
            return None
        import importlib.util
        ours = importlib.util.find_spec("lightcc" + name[len("horovod"):])
        if ours is not None:
            return ModuleSpec(name, _Alias(ours),  # type: ignore[arg-type]  # a Loader by its methods, which will do
                              origin=ours.origin, is_package=ours.submodule_search_locations is not None)
        # An import is told more than "no such module". Whoever asks with importlib.util.find_spec expects None.
        if sys._getframe(2).f_code.co_name == "_find_and_load_unlocked":
            raise ModuleNotFoundError(f"lightcc, which stands in for Horovod here, has no {name}", name=name)
        return None

    def find_distributions(self, context=None):
        """For importlib.metadata."""
        from importlib.metadata import Distribution

        class Horovod(Distribution):
            def read_text(self, filename):
                return metadata().get(filename)

            def locate_file(self, path):
                return os.path.join(FOLDER, path)

        name = getattr(context, "name", None)  # None asks for all that is installed
        asked = name is None or name.lower() == "horovod"
        # What --install has put into site-packages is found there without us.
        return iter([Horovod()] if asked and not any(map(is_ours, infos(sys.path))) else [])

    def _mention_real_horovod(self) -> None:
        if self.said or os.environ.get("HOROVOD_RANK", "0") != "0":
            return
        self.said = True
        real = PathFinder.find_spec("horovod", [folder for folder in sys.path if folder != FOLDER])
        if real is not None and real.origin:  # a folder named horovod has no origin
            import logging
            logging.getLogger("lightcc").warning("lightcc stands in for Horovod; the one in %s is not used",
                                                 os.path.dirname(real.origin))


class _Alias:
    """Loads a module of ours under a second name."""

    def __init__(self, ours: ModuleSpec) -> None:
        self._ours = ours

    def create_module(self, spec: ModuleSpec):
        return importlib.import_module(self._ours.name)

    def exec_module(self, module) -> None:
        module.__spec__ = self._ours  # the import system has just put the alias there

    def get_code(self, name: str):
        """For python -m."""
        loader = self._ours.loader
        assert loader is not None and hasattr(loader, "get_code")
        return loader.get_code(self._ours.name)


def install() -> None:
    """From now on `import horovod...` means lightcc in this process. What was imported before stays what it is.

    >>> install(); import horovod.common.exceptions, lightcc
    >>> horovod.common.exceptions is lightcc.common.exceptions
    True
    """
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def environment() -> dict[str, str]:
    """With this, every Python that is started does install()."""
    from lightcc.launch.local import pythonpath_setting

    path = pythonpath_setting().get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    others = path.split(os.pathsep) if path else []  # an empty name among others means the working directory
    return {"PYTHONPATH": os.pathsep.join([FOLDER, *(folder for folder in others if folder != FOLDER)])}


def main(words: list[str]) -> None:
    """Becomes the Python that the words ask for, with the flags that this one got: so sys.argv, __main__, tracebacks
    and exit codes are what they are without us."""
    import re

    if not words:
        sys.exit("say what to run: python -m lightcc.as_horovod script.py [arguments]; or -m module, or -c code")
    if words[0] in ("--install", "--uninstall"):
        from lightcc import install_as_horovod
        sys.exit(install_as_horovod.main(words))
    if sys.flags.ignore_environment:
        sys.exit("python -I and -E ignore PYTHONPATH, by which a Python hears that lightcc stands in for Horovod")
    with open("/proc/self/cmdline", "rb") as file:
        line = [os.fsdecode(word) for word in file.read().split(b"\0")[1:-1]]
    before = "\0".join(line[:len(line) - len(words)])
    ours = re.fullmatch(r"(.*?)(?:(?:^|\0)-)?m\0?lightcc\.as_horovod", before, re.DOTALL)
    flags = [flag for flag in ours[1].split("\0") if flag] if ours else []
    os.environ.update(environment())
    os.execv(sys.executable, [sys.executable, *flags, *words])


if __name__ == "__main__":
    main(sys.argv[1:])
