"""Small helpers that scripts written for Horovod import. None of them starts a process or loads a framework."""
import contextlib
import functools
import importlib.machinery
import importlib.util
import os
import re
import sysconfig
import warnings
from typing import Any, Callable, Iterator, List, Optional

from lightcc.core.build_queries import BuildQueries
from lightcc.core.exceptions import HorovodVersionMismatchError, get_version_mismatch_message

EXTENSIONS = ["tensorflow", "torch"]
_queries = BuildQueries()


def _cache(function: Callable) -> Callable:
    """A decorator: the function is called once for each set of arguments, which must be hashable.

    >>> calls = []
    >>> @_cache
    ... def count(x): calls.append(x); return len(calls)
    >>> count("a"), count("a"), count("b")
    (1, 1, 2)
    """
    return functools.cache(function)


def get_ext_suffix() -> str:
    """The file suffix of this interpreter's extension modules.

    >>> get_ext_suffix().endswith("so")
    True
    """
    return sysconfig.get_config_var("EXT_SUFFIX") or importlib.machinery.EXTENSION_SUFFIXES[0]


def get_extension_full_path(pkg_path: str, *args: Any) -> str:
    """The path of lightcc's one library. The arguments are Horovod's and are not used.

    >>> get_extension_full_path(__file__).endswith("_lightcc.so")
    True
    """
    return os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "_lightcc.so")


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: Any) -> None:
    """ImportError if lightcc's library is absent. The arguments are Horovod's; only `ext_name` is used, in the text.

    >>> check_extension("lightcc.torch", "", __file__)
    """
    path = os.environ.get("LIGHTCC_LIBRARY") or get_extension_full_path(pkg_path, *args)
    if not os.path.exists(path):
        raise ImportError(f"{ext_name} needs {path}, which does not exist. Reinstall lightcc (pip install "
                          "--force-reinstall lightcc), or in a source tree build it (make).")


def check_installed_version(name: str, version: str, exception: Optional[Exception] = None) -> None:
    """Compares the installed version of framework `name` with the `version` expected.

    Warns if they differ; raises HorovodVersionMismatchError if `exception` (a failed import) is given too.

    >>> check_installed_version("pip", __import__("pip").__version__)
    """
    installed = importlib.import_module(name).__version__
    if installed == version:
        return
    if exception is None:
        warnings.warn(get_version_mismatch_message(name, version, installed), stacklevel=2)
    else:
        raise HorovodVersionMismatchError(name, version, installed) from exception


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether lightcc has a package for this framework and the framework is installed.

    >>> extension_available("no_such_framework")
    False
    """
    available = all(_found(name) for name in (ext_base_name, "lightcc." + ext_base_name))
    if verbose:
        print(f"lightcc.{ext_base_name} is {'' if available else 'not '}available")
    return available


def _found(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def mpi_built(verbose: bool = False) -> bool:
    """HorovodBasics.mpi_built().

    >>> mpi_built() in (True, False)
    True
    """
    return _queries.mpi_built()


def gloo_built(verbose: bool = False) -> bool:
    """HorovodBasics.gloo_built().

    >>> gloo_built()
    True
    """
    return _queries.gloo_built()


def nccl_built(verbose: bool = False) -> int:
    """HorovodBasics.nccl_built().

    >>> nccl_built() >= 0
    True
    """
    return _queries.nccl_built()


def ddl_built(verbose: bool = False) -> bool:
    """HorovodBasics.ddl_built().

    >>> ddl_built()
    False
    """
    return _queries.ddl_built()


def ccl_built(verbose: bool = False) -> bool:
    """HorovodBasics.ccl_built().

    >>> ccl_built()
    False
    """
    return _queries.ccl_built()


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether this framework has a GPU: False, since it is not asked; it knows best (torch.cuda.is_available()). What
    lightcc can do with tensors of GPUs say cuda_built() and nccl_built().

    >>> gpu_available("torch")
    False
    """
    return False


@contextlib.contextmanager
def env(**kwargs: Optional[str]) -> Iterator[None]:
    """Sets environment variables and restores them; None leaves a variable as it is.

    >>> with env(LIGHTCC_TEST_EXAMPLE="1"):
    ...     os.environ["LIGHTCC_TEST_EXAMPLE"]
    '1'
    """
    before = {name: os.environ.get(name) for name, value in kwargs.items() if value is not None}
    os.environ.update({name: value for name, value in kwargs.items() if value is not None})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def get_average_backwards_compatibility_fun(reduce_ops: Any) -> Callable[[Optional[int], Optional[bool]], int]:
    """Makes the function (op, average) -> op that merges `op` with the deprecated `average`.

    reduce_ops: anything with attributes Average and Sum. Both given: ValueError. Neither: Average.

    >>> from lightcc.common.basics import HorovodBasics
    >>> get_average_backwards_compatibility_fun(HorovodBasics)(None, None)
    0
    """
    def merge(op: Optional[int], average: Optional[bool]) -> int:
        if average is None:
            return reduce_ops.Average if op is None else op
        if op is not None:
            raise ValueError("The op parameter supersedes average. Please provide only one of them.")
        warnings.warn("Parameter `average` has been replaced with `op`: use op=hvd.Average or op=hvd.Sum.",
                      DeprecationWarning, stacklevel=4)
        return reduce_ops.Average if average else reduce_ops.Sum
    return merge


def is_iterable(x: Any) -> bool:
    """Whether iter(x) works.

    >>> is_iterable([]), is_iterable(1)
    (True, False)
    """
    try:
        iter(x)
    except TypeError:
        return False
    return True


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Whether version `ver` is `target` (of the form a.b.c) or later; ValueError for anything else.

    >>> is_version_greater_equal_than("2.10.1+cpu", "2.9.0")
    True
    """
    if not isinstance(ver, str) or not isinstance(target, str) or not re.fullmatch(r"\d+\.\d+\.\d+", target):
        raise ValueError(f"is_version_greater_equal_than({ver!r}, {target!r}): give two strings, the second like "
                         "'1.2.3'.")
    numbers = re.match(r"\d+(\.\d+)*", ver)
    if numbers is None:
        raise ValueError(f"is_version_greater_equal_than({ver!r}, ...): not a version.")
    parts = [int(part) for part in numbers.group().split(".")][:3]
    return parts + [0] * (3 - len(parts)) >= [int(part) for part in target.split(".")]


def num_rank_is_power_2(num_rank: int) -> bool:
    """Whether num_rank is a power of two.

    >>> num_rank_is_power_2(8), num_rank_is_power_2(0)
    (True, False)
    """
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def split_list(l: List, n: int) -> List[List]:  # noqa: E741  Horovod's name
    """Cuts a list in n runs of nearly equal length, the longer ones first.

    >>> split_list([1, 2, 3, 4, 5], 2)
    [[1, 2, 3], [4, 5]]
    """
    short, longer = divmod(len(l), n)
    ends = [(i + 1) * short + min(i + 1, longer) for i in range(n)]
    return [l[end - short - (i < longer):end] for i, end in enumerate(ends)]
