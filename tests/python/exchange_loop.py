"""The plain loop over the models of all ranks in one process, against which LocalSGD and DiLoCo are held."""
import torch

import lightcc.torch as hvd
from training import data, loss_of, make_model

INNER = {"SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
         "AdamW": lambda params: torch.optim.AdamW(params, lr=0.02)}
OUTER = {"Nesterov": lambda params: torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True),
         "plain": lambda params: torch.optim.SGD(params, lr=1.0),
         "Adam": lambda params: torch.optim.Adam(params, lr=0.01)}


def loss_of_rank(model, step, rank):
    x, y = data(step)
    rows = len(x) // hvd.size()
    part = slice(rank * rows, (rank + 1) * rows)
    return loss_of(model, x[part].double(), y[part].double())


class Loop:
    """The models of all ranks, exchanged as the papers say."""

    def __init__(self, inner, sync_every, delay, outer=None, parts=None, alpha=0.0):
        """outer: None: weights are averaged. parts: indices of parameters."""
        self.models = [make_model().double() for _ in range(hvd.size())]
        self.optimizers = [inner(model.parameters()) for model in self.models]
        self.weights = [list(model.parameters()) for model in self.models]
        self.parts = parts or [list(range(len(self.weights[0])))]
        self.outer = [torch.nn.Parameter(p.detach().clone()) for p in self.weights[0]]
        self.outer_optimizer = outer and outer(self.outer)
        self.sync_every, self.delay, self.alpha = sync_every, delay, alpha
        self.sent = {}
        self.steps = 0

    def step(self, left_out_by=()):
        for rank, (model, optimizer) in enumerate(zip(self.models, self.optimizers)):
            optimizer.zero_grad()
            loss_of_rank(model, self.steps, rank).backward()
            if rank not in left_out_by:
                optimizer.step()
        self.steps += 1
        for fragment in range(len(self.parts)):
            due = (fragment + 1) * self.sync_every // len(self.parts)
            if self.delay and self.steps - self.delay > 0 and (self.steps - self.delay - due) % self.sync_every == 0:
                self.take_in(fragment)
            if (self.steps - due) % self.sync_every == 0:
                self.sent[fragment] = [[w[i].detach().clone() for w in self.weights] for i in self.parts[fragment]]
                if not self.delay:
                    self.take_in(fragment)

    @torch.no_grad()
    def take_in(self, fragment):
        sent = self.sent.pop(fragment)
        for i, of_ranks in zip(self.parts[fragment], sent):
            mean = sum(of_ranks) / len(of_ranks)
            if self.outer_optimizer is None:
                for weights, own in zip(self.weights, of_ranks):
                    weights[i].copy_(weights[i] + mean - own if self.delay else mean)
            else:
                self.outer[i].grad = self.outer[i].detach() - mean
        if self.outer_optimizer is not None:
            self.outer_optimizer.step()
            for i in self.parts[fragment]:
                self.outer[i].grad = None
                for weights in self.weights:
                    weights[i].copy_(self.alpha * weights[i] + (1 - self.alpha) * self.outer[i])

    def expect(self, model):
        for p, q in zip(model.parameters(), self.weights[hvd.rank()]):
            torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-11)
