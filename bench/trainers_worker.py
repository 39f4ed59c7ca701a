"""A rank of bench/trainers.py: `trainers_worker.py TRAINER BACKEND` trains a perceptron of 4 million parameters; rank 0
prints the median time of a step in milliseconds behind "found "."""
import statistics
import sys
import tempfile
import time
from typing import Any, Callable, Dict, List, Tuple

import torch

import lightcc.torch.accelerate
from lightcc.torch.lightning import HorovodStrategy

STEPS, WARM, BATCH, WIDTH = 60, 10, 8, 1024


class Model(torch.nn.Module):
    """Notes when each forward begins: between two of them lies a step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = torch.nn.Sequential(*(layer for _ in range(4) for layer in (
            torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU())))
        self.times: List[float] = []

    def forward(self, x: torch.Tensor, labels: Any = None) -> Dict[str, torch.Tensor]:
        self.times.append(time.perf_counter())
        return {"loss": self.layers(x).square().mean()}


def rows() -> List[Dict[str, torch.Tensor]]:
    return [{"x": row, "labels": row[:1]} for row in torch.randn(STEPS * BATCH * 2, WIDTH)]


def accelerate(backend: str) -> Tuple[int, Model]:
    from accelerate import Accelerator
    accelerator, model = Accelerator(cpu=True), Model()
    wrapped, optimizer, batches = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=1e-3), torch.utils.data.DataLoader(rows(), batch_size=BATCH))
    for batch in batches:
        accelerator.backward(wrapped(**batch)["loss"])
        optimizer.step()
        optimizer.zero_grad()
    return accelerator.process_index, model


def transformers(backend: str) -> Tuple[int, Model]:
    from transformers import Trainer, TrainingArguments
    model = Model()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(output_dir=folder, use_cpu=True, per_device_train_batch_size=BATCH, report_to=[],
                                      num_train_epochs=1, save_strategy="no", disable_tqdm=True)
        Trainer(model=model, args=arguments, train_dataset=rows()).train()
        return arguments.process_index, model


def lightning(backend: str) -> Tuple[int, Model]:
    from lightning.pytorch.strategies import DDPStrategy
    return _lightning(DDPStrategy(process_group_backend=backend))


def lightning_strategy(backend: str) -> Tuple[int, Model]:
    from lightning.pytorch.strategies import DDPStrategy
    return _lightning(HorovodStrategy() if backend == "lightcc" else DDPStrategy(process_group_backend=backend))


def _lightning(strategy: Any) -> Tuple[int, Model]:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def training_step(self, batch: Any, step: int) -> Any:
            return self.model(**batch)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    module = Module()
    trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, logger=False,
                                enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(module, torch.utils.data.DataLoader(rows(), batch_size=BATCH))
    return trainer.global_rank, module.model


TRAINERS: Dict[str, Callable[[str], Tuple[int, Model]]] = {
    "accelerate": accelerate, "transformers": transformers, "lightning": lightning,
    "lightning_strategy": lightning_strategy}

if __name__ == "__main__":
    name, backend = sys.argv[1:]
    if backend == "lightcc":
        lightcc.torch.accelerate.init()
    rank, model = TRAINERS[name](backend)
    assert torch.distributed.get_backend() == backend and torch.distributed.get_world_size() == 2
    steps = [1e3 * (end - begin) for begin, end in zip(model.times[WARM:], model.times[WARM + 1:])]
    if rank == 0:
        print(f"found {statistics.median(steps)}", flush=True)
    torch.distributed.destroy_process_group()
