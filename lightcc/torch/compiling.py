"""Keeps torch.compile out of lightcc: a compiled training step calls it as it is, and compiles what is the user's.

Tracing could gain nothing here: what the hooks do is a copy and a call of the core, which no graph can hold. It would
cost a compilation and guards for each function. The marks cost a call nothing and need no import of torch._dynamo.
"""
import inspect
import sys
from types import FunctionType, ModuleType
from typing import Any, Iterator

import torch


def functions_of(module: ModuleType) -> Iterator[FunctionType]:
    """The functions that a module defines, also as methods and beneath decorators.

    >>> import lightcc.core.ops; "allreduce" in [function.__name__ for function in functions_of(lightcc.core.ops)]
    True
    """
    for value in vars(module).values():
        members = vars(value).values() if inspect.isclass(value) else [value]
        for member in members:
            function = getattr(member, "__func__", None) or getattr(member, "fget", None) or member
            while isinstance(function, FunctionType) and function.__module__ == module.__name__:
                yield function
                function = getattr(function, "__wrapped__", None)


def keep_out() -> None:
    """Makes torch.compile call the functions of all modules of lightcc that are loaded by now, as if under
    torch.compiler.disable.

    >>> keep_out()
    """
    eval_frame: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    skipped = None
    if hasattr(eval_frame, "_FrameExecStrategy"):  # torch 2.6 or later; an older one traces the hooks, which also works
        skipped = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT)
    for module in [module for name, module in list(sys.modules.items()) if name.split(".")[0] == "lightcc"]:
        for function in functions_of(module):
            function._torchdynamo_disable = True
            function._torchdynamo_disable_msg = "lightcc's communication stays outside of graphs"
            if skipped is not None:
                eval_frame.set_code_exec_strategy(function.__code__, skipped)
