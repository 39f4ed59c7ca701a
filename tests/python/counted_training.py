"""Training by the workers of elastic_worlds.py, in which every sample is counted: a worker that dies where its
test says, and what the counts must be at the end."""
import dying_workers
import torch
from dying_workers import Worker, result_of

import lightcc.torch as hvd

__all__ = ["result_of"]
SAMPLES, EPOCHS = 48, 2
OPTIONS = {**dying_workers.OPTIONS, "passes": 1, "epochs": EPOCHS}  # those that Training reads, and "where"


class Training(Worker):
    """One worker. A subclass has step(ids), trained(ids), which notes what the step was, and a state for begin(), which
    has sampler, epoch, batch and steps."""

    def __init__(self, worlds, options):
        super().__init__(worlds, options)
        self.sampler = hvd.elastic.ElasticSampler(range(SAMPLES), seed=options["seed"])

    def train(self, state):
        assert hvd.size() == len(self.worlds.members)
        while state.epoch < self.options["epochs"]:
            for ids in torch.utils.data.DataLoader(range(SAMPLES), 2 * self.options["passes"], sampler=state.sampler):
                self.step(ids)
                state.sampler.record_batch(state.batch, len(ids))
                state.batch += 1
                state.steps += 1
                self.trained(ids)
                self.announce()
                if state.steps % self.options["commit_every"] == 0:
                    state.commit()
                else:
                    state.check_host_updates()
            state.epoch += 1
            state.batch = 0
            state.sampler.set_epoch(state.epoch)
            state.commit()


def prepare():
    """Before workers are forked: what torch imports late."""
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1).step()


def expect_each_once(counts, largest):
    """largest: world in which an epoch may have ended."""
    padding = sum(counts) - SAMPLES * EPOCHS
    assert min(counts) >= EPOCHS and 0 <= padding <= EPOCHS * (largest - 1), counts
