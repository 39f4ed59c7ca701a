"""Spares the programs of tests the import of torch._dynamo, which takes longer than that of torch itself.

torch.optim imports it at the first call of an optimizer, only to tell torch.compile what not to look into. torch itself
calls register() when it is imported, by the entry point beside this file, since conftest.py has this folder in
PYTHONPATH. From then on optimizers do the same without asking torch._dynamo; who compiles still imports it.
"""
import functools


def register():
    import torch

    for optimizer in {torch.optim.Optimizer, *torch.optim.Optimizer.__subclasses__()}:
        for name, function in list(vars(optimizer).items()):
            plain = getattr(function, "__wrapped__", None)
            code = getattr(function, "__code__", None)
            if plain is None or code is None:
                continue
            if code.co_name == "_use_grad":
                setattr(optimizer, name, _with_grad_if_differentiable(plain, torch))
            elif "__dynamo_disable" in code.co_consts:  # torch looks here before it asks torch._dynamo
                plain.__dynamo_disable = plain


def _with_grad_if_differentiable(step, torch):
    @functools.wraps(step)
    def call(self, *arguments, **options):
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return step(self, *arguments, **options)
    return call
