"""A GradScaler leaves out the step of an optimizer whose gradients are not finite. Each rank's gradients of tables are
its
own until step(), so the ranks agree first: what is not finite on one rank is so on all, and all leave the step out."""
import torch

from lightcc.torch.grad_scaler import finite_everywhere, reduce_first


def agree_first(optimizer: torch.optim.Optimizer) -> None:
    """From now on the ranks agree, whenever a GradScaler is given this optimizer, before it looks at gradients."""
    reduce_first(optimizer)


def agree(optimizer: torch.optim.Optimizer) -> None:
    """Drops the gradients of all ranks if some rank's are not finite, and has the scaler find an infinite one."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not finite_everywhere((parameter.grad for parameter in parameters),
                             (parameter.table.process_set for parameter in parameters), "lightcc.embedding.scaler"):
        optimizer.zero_grad()
        for parameter in parameters:
            parameter.overflow()
