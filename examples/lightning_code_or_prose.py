"""A small net learns to tell Python code from prose, with PyTorch Lightning over lightcc's DistributedOptimizer.

    lightccrun -np 2 python examples/lightning_code_or_prose.py --png curve.png

pip install lightning. Plain `python` starts it as well: then Lightning starts a second rank. Gradients travel as
float16, which DistributedDataParallel would need a hook for.
"""
import os

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

import code_or_prose
import lightcc.torch as hvd
from lightcc.torch.lightning import HorovodStrategy


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net, self.losses = code_or_prose.Net(), []

    def training_step(self, batch, step):
        loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def test_step(self, batch, step):
        right = (self.net(batch[0]).argmax(1) == batch[1]).float().mean()
        self.log("accuracy", right, sync_dist=True, batch_size=len(batch[1]))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=2e-3 * self.trainer.world_size ** 0.5)


def main():
    args = code_or_prose.arguments(__doc__)
    torch.set_num_threads(1)  # the ranks share the cores
    train, test = code_or_prose.load(args.lines)
    torch.manual_seed(1)
    model = Classifier()
    trainer = lightning.Trainer(
        accelerator="cpu", devices=int(os.environ.get("LOCAL_WORLD_SIZE", 2)), max_epochs=args.epochs, logger=False,
        strategy=HorovodStrategy(compression=hvd.Compression.fp16), enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(model, DataLoader(TensorDataset(*train), code_or_prose.BATCH, shuffle=True, drop_last=True))
    found, = trainer.test(model, DataLoader(TensorDataset(*test), 256), verbose=False)
    if trainer.is_global_zero:
        code_or_prose.report("Lightning", model.losses, found["accuracy"], trainer.world_size, args.png)


if __name__ == "__main__":
    main()
