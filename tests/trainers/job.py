"""A rank that trains the same small model by three trainers: `job.py BACKEND [TRAINER...]`. Each prints a line: its
name, the rank, and the loss and the sum of the weights in the end, exactly."""
import json
import os
import signal
import sys
import tempfile

import torch
import torch.distributed as dist

STEPS, BATCH = 6, 8


def data():
    torch.manual_seed(0)
    x = torch.randn(STEPS * BATCH * 2, 8)
    return torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))


def made():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))


def loader():
    return torch.utils.data.DataLoader(data(), batch_size=BATCH)


def say(name, rank, loss, model):
    weights = sum(parameter.double().sum().item() for parameter in model.parameters())
    os.write(1, f"{json.dumps([name, rank, loss, weights, dist.get_backend()])}\n".encode())  # torchrun tags no lines


def killed(rank, step):
    if os.environ.get("KILLED") == str(rank) and step == 3:
        os.kill(os.getpid(), signal.SIGKILL)


def accelerate(backend):
    _accelerate("accelerate", backend)


def _accelerate(name, backend, distributed=None):
    from accelerate import Accelerator
    if backend == "lightcc":
        import lightcc.torch.accelerate
        lightcc.torch.accelerate.init()
    accelerator = Accelerator(cpu=True)
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    if distributed is None:
        model, optimizer, batches = accelerator.prepare(model, optimizer, loader())
    else:
        optimizer, batches = accelerator.prepare(distributed(model, optimizer), loader())
    for step, (x, y) in enumerate(batches):
        killed(accelerator.process_index, step)
        loss = torch.nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    assert accelerator.gather(torch.tensor([accelerator.process_index])).tolist() == [*range(dist.get_world_size())]
    say(name, accelerator.process_index, loss.item(), model)


def accelerate_optimizer(backend):
    """DistributedOptimizer in place of DistributedDataParallel."""
    import lightcc.torch as hvd

    def distributed(model, optimizer):
        hvd.broadcast_parameters(model.state_dict(), 0)
        return hvd.DistributedOptimizer(optimizer, model.named_parameters())

    _accelerate("accelerate_optimizer", backend, distributed if backend == "lightcc" else None)


def transformers(backend):
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
    if backend == "lightcc":
        import lightcc.torch.accelerate
        lightcc.torch.accelerate.init()
    torch.manual_seed(1)
    model = BertForSequenceClassification(BertConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1,
                                                     num_attention_heads=2, intermediate_size=16))
    torch.manual_seed(0)
    rows = [{"input_ids": torch.randint(0, 32, (8,)), "labels": i % 2} for i in range(STEPS * BATCH * 2)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(output_dir=folder, use_cpu=True, per_device_train_batch_size=BATCH, seed=3,
                                      num_train_epochs=1, report_to=[], save_strategy="no", disable_tqdm=True)
        trainer = Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows)
        trainer.train()
        loss = trainer.evaluate()["eval_loss"]
    say("transformers", arguments.process_index, loss, model)


def lightning(backend):
    from lightning.pytorch.strategies import DDPStrategy

    import lightcc.torch.process_group  # noqa: F401
    _lightning("lightning", DDPStrategy(process_group_backend=backend))


def lightning_strategy(backend):
    """HorovodStrategy beside DDPStrategy, with a clipped norm and an accumulation that ends in the midst."""
    from lightning.pytorch.strategies import DDPStrategy
    if backend == "gloo":
        strategy = DDPStrategy(process_group_backend="gloo")
    else:
        from lightcc.torch.lightning import HorovodStrategy
        strategy = HorovodStrategy()
    _lightning("lightning_strategy", strategy, gradient_clip_val=0.3, accumulate_grad_batches=4)


def _lightning(name, strategy, **options):
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = made()

        def training_step(self, batch, step):
            killed(self.global_rank, step)
            self.loss = torch.nn.functional.mse_loss(self.model(batch[0]), batch[1])
            self.log("loss", self.loss, sync_dist=True)
            return self.loss

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    module = Module()
    trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=2, logger=False,
                                enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
                                **options)
    trainer.fit(module, loader())
    say(name, trainer.global_rank, trainer.callback_metrics["loss"].item(), module)


if __name__ == "__main__":
    if "KILLED" in os.environ:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # of the launcher, before this rank has told
    for trainer in sys.argv[2:]:
        globals()[trainer](sys.argv[1])
    if dist.is_initialized():
        dist.destroy_process_group()
