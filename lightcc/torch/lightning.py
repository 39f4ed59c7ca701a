"""PyTorch Lightning with hvd.DistributedOptimizer in place of DistributedDataParallel: what Lightning's own
HorovodStrategy was until 2.0.

    from lightcc.torch.lightning import HorovodStrategy
    trainer = Trainer(accelerator="cpu", devices=2, strategy=HorovodStrategy(compression=hvd.Compression.topk(0.01)))

The job starts by Lightning's own launcher, lightccrun, torchrun or mpirun; `devices` is the number of ranks of a host.
"""
from typing import Any, Callable, Optional

import torch

import lightcc.torch as hvd
import lightcc.torch.process_group  # noqa: F401  the backend "lightcc"

try:
    from lightning.pytorch.strategies import DDPStrategy
except ModuleNotFoundError as error:
    if error.name != "lightning":
        raise
    try:
        from pytorch_lightning.strategies import DDPStrategy
    except ModuleNotFoundError:
        raise ImportError("lightcc.torch.lightning needs Lightning 2.0 or later: pip install lightning") from None

if not hasattr(DDPStrategy, "configure_ddp"):
    raise ImportError("lightcc.torch.lightning needs Lightning's DDPStrategy with configure_ddp(), as 2.0 to 2.6 have "
                      "it; this one has another.")

__all__ = ["HorovodStrategy"]


class HorovodStrategy(DDPStrategy):
    """Each optimizer of the module becomes a DistributedOptimizer; all else is DDPStrategy's, over lightcc.

    distributed: arguments of hvd.DistributedOptimizer, such as compression, op and groups; named_parameters are the
    module's, backward_passes_per_step is the Trainer's accumulate_grad_batches. strategy: arguments of DDPStrategy
    that say no more than how the job starts, such as start_method="spawn".

    Gradients are averaged before Lightning clips them. In manual optimization opt.step() averages them; clip after
    opt.optimizer.synchronize().

    Errors: those of hvd.DistributedOptimizer. ImportError on import for a Lightning before 2.0.
    Source: HorovodStrategy of PyTorch Lightning 1.9.
    """

    strategy_name = "horovod"

    def __init__(self, *, strategy: Optional[dict[str, Any]] = None, **distributed: Any):
        super().__init__(process_group_backend="lightcc", **(strategy or {}))
        self._distributed = distributed

    def configure_ddp(self) -> None:
        """Leaves the module as it is, with the weights of rank 0."""
        hvd.broadcast_parameters(self.lightning_module.state_dict(), 0)

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        names = {parameter: name for name, parameter in self.lightning_module.named_parameters()}

        def distributed(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
            its = [(names[parameter], parameter) for group in optimizer.param_groups for parameter in group["params"]]
            return hvd.DistributedOptimizer(optimizer, its, **self._distributed)

        self.optimizers = [distributed(optimizer) for optimizer in self.optimizers]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        for optimizer in self.optimizers:
            optimizer.backward_passes_per_step = self.lightning_module.trainer.accumulate_grad_batches

    def optimizer_step(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any],
                       model: Optional[torch.nn.Module] = None, **options: Any) -> Any:
        """Averages the gradients between backward, which the closure does, and whatever comes before the step."""
        def averaged() -> Any:
            loss = closure()
            optimizer.synchronize()
            return loss

        with optimizer.skip_synchronize():
            return super().optimizer_step(optimizer, averaged, model, **options)
