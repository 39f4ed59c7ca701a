"""Mixed precision that switches while a model is trained, with PyTorch.

    lightccrun -np 2 python examples/pytorch_amp.py --output DIR

Fits a perceptron to real data three times: in full precision, in bfloat16, and by a policy that begins in bfloat16 and
goes to float32 when the loss no longer falls, and after each change of the learning rate. DIR/run.png shows the losses.
"""
import diabetes
import torch

import lightcc.torch as hvd


def train(policy, seed, steps):
    x, y = map(torch.from_numpy, diabetes.load(seed, hvd.rank(), hvd.size()))
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(10, diabetes.HIDDEN), torch.nn.ReLU(), torch.nn.Linear(diabetes.HIDDEN, diabetes.HIDDEN),
        torch.nn.ReLU(), torch.nn.Linear(diabetes.HIDDEN, 1))
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters()), model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    precision = hvd.amp.MixedPrecision(optimizer, policy)
    losses = []
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = diabetes.rate_of(step)
        optimizer.zero_grad()
        with precision:
            output = model(x)
        loss = torch.nn.functional.mse_loss(output.float(), y)
        precision.backward(loss)
        precision.step()
        losses.append(loss.detach())
    return hvd.allreduce(torch.stack(losses)).tolist(), precision.history().levels()


if __name__ == "__main__":
    hvd.init()
    torch.set_num_threads(1)
    diabetes.run(train, hvd, __doc__)
