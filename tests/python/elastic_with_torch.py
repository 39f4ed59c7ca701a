"""The part of elastic_training.py that is PyTorch's: a DistributedOptimizer, a TorchState and an ElasticSampler."""
import torch

import elastic_model
import lightcc.torch as hvd

run, Base = hvd.elastic.run, hvd.elastic.TorchState


def state_of(State, point, **values):
    torch.set_num_threads(1)
    model = elastic_model.network(values["seed"])
    optimizer = hvd.DistributedOptimizer(elastic_model.optimizer(model), named_parameters=model.named_parameters())
    # The gradients of the later layer have been sent by then.
    model[0].weight.register_post_accumulate_grad_hook(lambda parameter: point("allreduce"))
    return State(model, optimizer, sampler=hvd.elastic.ElasticSampler(range(elastic_model.SAMPLES)), **values)


def samples_of(state):
    """Those of this rank that are left of the pass."""
    return list(state.sampler)


def step(state, chosen, point):
    state.optimizer.zero_grad()
    elastic_model.loss(state.model, chosen).backward()
    point("backward")
    state.optimizer.step()
    state.sampler.record_batch(0, len(chosen))


def begin_pass(state):
    state.sampler.set_epoch(state.passes)


def weights(state):
    return elastic_model.weights(state.model).tolist()
