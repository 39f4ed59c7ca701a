"""A small net learns to tell Python code from prose, with Accelerate over lightcc.

    lightccrun -np 2 python examples/accelerate_code_or_prose.py --png curve.png

pip install accelerate. Only the call of init is lightcc's; the rest is an ordinary program for Accelerate.
"""
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

import code_or_prose
import lightcc.torch.accelerate


def main():
    args = code_or_prose.arguments(__doc__)
    torch.set_num_threads(1)  # the ranks share the cores
    lightcc.torch.accelerate.init()
    accelerator = Accelerator(cpu=True)
    train, test = code_or_prose.load(args.lines)
    torch.manual_seed(1)
    model = code_or_prose.Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3 * accelerator.num_processes ** 0.5)
    model, optimizer, batches, tests = accelerator.prepare(
        model, optimizer, DataLoader(TensorDataset(*train), code_or_prose.BATCH, shuffle=True, drop_last=True),
        DataLoader(TensorDataset(*test), 256))

    losses = []
    for _ in range(args.epochs):
        for ids, classes in batches:
            loss = torch.nn.functional.cross_entropy(model(ids), classes)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    right = total = 0
    with torch.no_grad():
        for ids, classes in tests:
            found, classes = accelerator.gather_for_metrics((model(ids).argmax(1), classes))
            right, total = right + (found == classes).sum().item(), total + len(classes)
    if accelerator.is_main_process:
        code_or_prose.report("Accelerate", losses, right / total, accelerator.num_processes, args.png)
    accelerator.end_training()


if __name__ == "__main__":
    main()
