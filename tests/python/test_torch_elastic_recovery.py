"""Workers are killed, and training goes on: every sample is in the parameters as often as it should be.

What a rank trains is a count: each step adds one to the weights of each sample of the batch, so the parameters at the
end say which samples they have seen, and how often. Further parameters count the samples of all ranks; they make
gradients of many sizes, so that some are on their way and some not when a worker dies.
"""
import json
import logging

import elastic_worlds
import pytest
import torch
from counted_training import OPTIONS, SAMPLES, Training, expect_each_once, prepare, result_of

import lightcc.torch as hvd
from lightcc.core.elastic_state import run_fn

__all__ = ["prepare"]  # which the nursery calls
SHAPES = (3,), (500,), (20_000,), (7,), (350, 200), (350, 200), (1,), (500, 600)  # of the further parameters
NEWCOMERS = 1e6  # in the weights of a newcomer, which nobody must get


class Job(Training):
    """One worker: its model and optimizer."""

    def __init__(self, worlds, options):
        super().__init__(worlds, options)
        self.model = torch.nn.Module()
        self.model.seen = torch.nn.Embedding(SAMPLES, 2, sparse="sparse" in options["gradients"], dtype=torch.float64)
        self.model.others = torch.nn.ParameterList(torch.zeros(shape) for shape in SHAPES)
        torch.nn.init.constant_(self.model.seen.weight, NEWCOMERS if worlds.number else 0.0)
        self.passes = options["passes"]
        others = list(self.model.others)
        compression = {"none": hvd.Compression.none, "fp16": hvd.Compression.fp16,
                       "int8": hvd.Compression.int8(), "topk": hvd.Compression.topk(0.05)}[options["compression"]]
        self.optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(self.model.parameters(), lr=1.0), self.model.named_parameters(), op=hvd.Sum,
            backward_passes_per_step=self.passes, compression=compression,
            groups=[others[1:4]] if options["groups"] == "list" else options["groups"] or None,
            sparse_as_dense=options["gradients"] == "sparse as dense")
        self.begin(hvd.elastic.TorchState(self.model, self.optimizer, sampler=self.sampler, epoch=0, batch=0, steps=0,
                                          sizes=[]))
        others[4].register_post_accumulate_grad_hook(self.in_backward)
        self.wrap(self.optimizer, "synchronize")
        self.wrap(self.state, "check_host_updates", "commit")
        self.wrap(self.state._handlers["optimizer"], "sync")

    def in_backward(self, _):
        if self.dies("backward"):
            elastic_worlds.die()

    def loss_of(self, ids):
        """Its gradient with respect to a weight is minus how often that is in ids, or how many these are."""
        return -self.model.seen(ids).sum() - len(ids) * sum(p.sum() for p in self.model.others)

    def trained(self, ids):
        self.state.sizes.append(hvd.size() * len(ids))

    def step(self, ids):
        if not self.options["zero last"]:
            self.optimizer.zero_grad()
        for part in [*ids.chunk(self.passes), *[ids[:0]] * self.passes][:self.passes]:
            self.loss_of(part).backward()
        self.optimizer.step()
        if self.options["zero last"]:
            self.optimizer.zero_grad()


def add_what_is_left_behind(job):
    """To the parameters, which so have all of each gradient. Steps subtract these."""
    saved = hvd.gather_residuals(job.optimizer) or {"tensors": {}}
    for name, tensor in saved["tensors"].items():
        flat = dict(job.model.named_parameters())[name].detach().view(-1)
        for piece in tensor["pieces"]:
            flat[piece["first"]:piece["first"] + len(piece["values"])] -= piece["values"]


def work(worlds, options):
    """Of a worker."""
    logging.basicConfig()
    worlds.enter()
    job = Job(worlds, options)
    run_fn(job.train, worlds.leave_and_enter)(job.state)
    others = job.model.others
    if options["compression"] in ("int8", "topk"):
        stats = hvd.compression_stats(job.optimizer)
        assert stats["ratio"] < 0.5 and not stats["dense"], stats
    add_what_is_left_behind(job)
    assert all(p.eq(p.flatten()[0]).all() for p in others), "parts of a gradient are missing"
    counts = job.model.seen.weight.detach()[:, 1].long().tolist()
    print("result", json.dumps([counts, [int(p.flatten()[0]) for p in others], job.state.sizes, worlds.number]))
    hvd.shutdown()


PLAIN = {**OPTIONS, "groups": 0, "gradients": "dense", "compression": "none", "zero last": False,
         "where": ["synchronize"]}


@pytest.fixture(scope="module")
def nursery():
    with elastic_worlds.Nursery("test_torch_elastic_recovery") as nursery:
        yield nursery


@pytest.fixture
def train(nursery, tmp_path):
    return lambda worlds, **options: count(nursery, tmp_path, worlds, **options)


def count(nursery, folder, worlds, **options):
    """How often each sample is in the parameters at the end, on all ranks of the last world alike."""
    variables = {name: options.pop(name) for name in list(options) if name.isupper()}
    options = {**PLAIN, **options}
    print(options)
    texts = nursery.run(worlds, folder, options, **variables)
    counts, others, sizes = result_of(texts, worlds)
    assert others == [sum(counts)] * len(others), "the gradients are of different samples"
    assert sum(sizes) == sum(counts), "what was committed beside the parameters is of other steps"
    return counts


# A lost worker, a newcomer, and rank 0 lost while the newcomer is new; names are not ranks.
LOST_NEW_LOST = [[0, 1, 2], [0, 2], [0, 2, 3], [2, 3]]


@pytest.mark.parametrize("options", [
    {}, {"passes": 2}, {"groups": "list"}, {"groups": 2, "zero last": True}, {"compression": "fp16"},
    {"gradients": "sparse"}, {"gradients": "sparse as dense"}, {"passes": 2, "zero last": True}], ids=str)
def test_each_sample_is_seen_once(options, train):
    where = ["synchronize", "backward", "commit"]
    expect_each_once(train(LOST_NEW_LOST, where=where, **options), 3)


def test_with_sparser_commits_parameters_and_progress_go_back_together(train):
    """What was trained since the commit is trained again, from its parameters: so none of it is in them twice."""
    expect_each_once(train(LOST_NEW_LOST, commit_every=3, where=["backward"], seed=2), 3)


def test_a_worker_that_dies_while_the_state_is_sent(train):
    """Of a world with a newcomer: the newcomer, then rank 0, whose commit the others may have in part."""
    worlds = [[0, 1], [0, 1, 2], [0, 1], [0, 1, 3], [1, 3]]
    expect_each_once(train(worlds, where=["sync"], seed=3), 3)


def test_a_world_shrinks_to_one_rank_and_grows_again(train):
    expect_each_once(train([[0, 1], [1], [1, 2]], where=["synchronize"], seed=4), 2)


@pytest.mark.parametrize("commit_every", [1, 100])
def test_hosts_come_and_go_and_nothing_is_trained_again(commit_every, train):
    """Also what was not committed is kept."""
    worlds = [[0, 1, 2], [0, 1], [0, 1, 3], [1, 3]]
    expect_each_once(train(worlds, where=["leave"], commit_every=commit_every, seed=5), 3)


def test_what_compression_has_left_behind_is_kept_where_nobody_is_lost(train):
    expect_each_once(train([[0, 1], [0, 1, 2], [0, 1, 2, 3]], compression="topk", LIGHT_INTRA_SIZE="1",
                           LIGHT_TOPK_THRESHOLD="0"), 4)


@pytest.mark.parametrize("groups", [0, "list"])
def test_compressed_gradients_go_on(groups, train):
    """Each rank is a node, so gradients travel compressed; whole numbers up to 127 are exact in int8."""
    expect_each_once(train(LOST_NEW_LOST, where=["synchronize", "commit", "backward"], compression="int8",
                           groups=groups, LIGHT_INTRA_SIZE="1", LIGHT_TOPK_THRESHOLD="0"), 3)
