"""A GradScaler leaves out the step of an optimizer whose gradients are not finite. Each rank's gradients of tables are
its
own until step(), so the ranks agree first: what is not finite on one rank is so on all, and all leave the step out."""
import torch

from lightcc.core import ops
from lightcc.torch.grad_scaler import reduce_first


def agree_first(optimizer: torch.optim.Optimizer) -> None:
    """From now on the ranks agree, whenever a GradScaler is given this optimizer, before it looks at gradients."""
    reduce_first(optimizer)


def agree(optimizer: torch.optim.Optimizer) -> None:
    """Drops the gradients of all ranks if some rank's are not finite, and has the scaler find an infinite one."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    by_set = {id(parameter.table.process_set): parameter.table.process_set for parameter in parameters}
    wrong = torch.tensor([not all(parameter.grad.isfinite().all() for parameter in parameters)], dtype=torch.int32)
    for process_set in by_set.values():
        wrong = ops.allreduce(wrong, op=ops.ReduceOps.Max, name="lightcc.embedding.scaler", process_set=process_set)
    if wrong.item():
        optimizer.zero_grad()
        for parameter in parameters:
            parameter.overflow()
