"""DistributedOptimizer around torch's optimizers: every kind, names, groups, state, copies, several at once."""
import copy
import gc
import io
import pickle
import warnings
import weakref

import pytest
import torch

import lightcc.torch as hvd
import ranks
from training import OPTIMIZERS, data, expect_equal, loss_of, make_model, my_loss, pair, sgd, train, train_alone

pytestmark = pytest.mark.usefixtures("job")


@pytest.mark.parametrize("np", ranks.SIZES)
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


# Wrapping

@pytest.mark.parametrize("kind", ["Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam",
                                  "RAdam", "RMSprop", "Rprop", "SGD"])
@pytest.mark.parametrize("foreach", [False, True], ids=["one by one", "foreach"])
def check_every_optimizer_trains(kind, foreach):
    def make(model):
        return getattr(torch.optim, kind)(model.parameters(), lr=0.01, foreach=foreach)

    model, optimizer, reference, plain = pair(make)
    assert type(optimizer).__name__ == kind and isinstance(optimizer, getattr(torch.optim, kind))
    train(model, optimizer, 4)
    train_alone(reference, plain, 4)
    expect_equal(model, reference, rtol=1e-3, atol=1e-4)


class OfAFramework:
    """Wraps an optimizer as frameworks do: the plain methods of its class's first base, and its own step."""

    def __init__(self, inner):
        self.__dict__ = {name: value for name, value in inner.__dict__.items() if name != "step"}
        self.__class__ = type("OfAFramework", (type(self), type(inner).__bases__[0]), {})
        self.inner = inner

    def step(self):
        self.inner.step()


@pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum])
def check_the_first_base_is_the_plain_class(op):
    model, optimizer, reference, plain = pair(op=op)
    assert type(optimizer).__bases__[0] is torch.optim.SGD and type(optimizer).__module__ == "lightcc.torch.optimizer"
    outer = OfAFramework(optimizer)
    train(model, outer, 2)
    if op == hvd.Average:
        train_alone(reference, plain, 2)
        expect_equal(model, reference)
    assert outer.state_dict()["state"].keys() == optimizer.state_dict()["state"].keys() != set()


class Own(torch.optim.SGD):
    """Its methods that the wrapper has, too, are called by the wrapper's."""

    def zero_grad(self, set_to_none=True):
        self.calls = [*getattr(self, "calls", ()), "zero_grad"]
        super().zero_grad(set_to_none)

    def state_dict(self):
        return {**super().state_dict(), "own": 1}

    def load_state_dict(self, state_dict):
        self.loaded = state_dict.pop("own")
        super().load_state_dict(state_dict)


def check_methods_of_a_class_of_the_users():
    model, optimizer, reference, plain = pair(lambda model: Own(model.parameters(), lr=0.1))
    train(model, optimizer, 2)
    train_alone(reference, plain, 2)
    expect_equal(model, reference)
    assert optimizer.calls == ["zero_grad"] * 2
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.loaded == 1
    again = copy.deepcopy(optimizer)
    assert isinstance(again, Own) and type(again).__bases__[0] is Own


@pytest.mark.parametrize("kind", ["Adagrad", "Adam", "AdamW", "SGD"])
def check_fused_optimizers_train(kind):
    def make(model):
        return getattr(torch.optim, kind)(model.parameters(), lr=0.01, fused=True)

    model, optimizer, reference, plain = pair(make)
    train(model, optimizer, 4)
    train_alone(reference, plain, 4)
    expect_equal(model, reference)


def check_muon_trains():
    model, reference = (torch.nn.Sequential(torch.nn.Linear(5, 8, bias=False), torch.nn.Linear(8, 3, bias=False))
                        for _ in range(2))
    hvd.broadcast_parameters(model.state_dict(), 0)
    reference.load_state_dict(model.state_dict())
    train(model, hvd.DistributedOptimizer(torch.optim.Muon(model.parameters(), lr=0.01)), 3)
    train_alone(reference, torch.optim.Muon(reference.parameters(), lr=0.01), 3)
    expect_equal(model, reference, rtol=1e-2, atol=1e-2)  # in bfloat16


def check_names():
    model = make_model()
    named = list(model.named_parameters())
    optimizer = hvd.DistributedOptimizer(sgd(model), named_parameters=iter(named))
    assert optimizer._parameter_names == {p: name for name, p in named}
    unused = ("unused", torch.ones(1, requires_grad=True))
    hvd.DistributedOptimizer(sgd(model), named_parameters=[unused, *named])
    for wrong in (dict(named), [list(entry) for entry in named], list(model.parameters()), [("a", 1, 2)], named[:1],
                  [], [("x", p) for _, p in named], named + named[:1]):
        with pytest.raises(ValueError, match="named_parameters"):
            hvd.DistributedOptimizer(sgd(model), named_parameters=wrong)
    with pytest.raises(ValueError, match="named_parameters"):
        hvd.DistributedOptimizer(sgd(model), named_parameters=make_model().named_parameters())


def check_wrapped_twice():
    model, optimizer, reference, plain = pair()
    with pytest.raises(ValueError, match="already"):
        hvd.DistributedOptimizer(optimizer)
    again = sgd(model)
    for _ in range(3):  # the last wrapper counts: the others are gone
        optimizer = hvd.DistributedOptimizer(again, named_parameters=model.named_parameters())
        train(model, optimizer, 1)
        train_alone(reference, plain, 1)
    expect_equal(model, reference)


def check_an_optimizer_is_gone_as_soon_as_it_is_dropped():
    model, optimizer, _, _ = pair()
    train(model, optimizer, 1)
    gone = weakref.ref(optimizer)
    gc.collect()
    gc.disable()
    try:
        del optimizer
        assert gone() is None
    finally:
        gc.enable()
    with pytest.warns(UserWarning, match="DistributedOptimizer of class SGD was dropped, and backward") as said:
        for _ in range(2):
            model(torch.ones(1, 5)).sum().backward()
    assert len(said) == 1


def check_an_optimizer_that_another_one_follows_is_dropped_in_silence():
    model, optimizer, reference, plain = pair()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            train(model, optimizer, 1)
            train_alone(reference, plain, 1)
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            plain = torch.optim.SGD(reference.parameters(), lr=0.1)
            assert len(model[0].weight._post_accumulate_grad_hooks) <= 2  # of this one, and of that which it follows
    expect_equal(model, reference)


@pytest.mark.parametrize("listed", [False, True])
def check_a_group_where_ranks_have_their_parameters_in_different_orders(listed):
    """Of one shape, so that nothing but their places in the group can tell them apart."""
    parameters = [torch.nn.Parameter(torch.zeros(5)) for _ in range(4)]
    named = [(f"p{i}", parameter) for i, parameter in enumerate(parameters)]
    mine = named[hvd.rank():] + named[:hvd.rank()]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p for _, p in mine], lr=1.0), named_parameters=mine,
                                         groups=[[parameters[0], parameters[3], parameters[1]]] if listed else 1)
    for step in (1, 2):
        optimizer.zero_grad()
        sum(p.sum() * 10 ** i * step for i, p in enumerate(parameters)).backward()
        optimizer.synchronize()
        assert [p.grad[0].item() for p in parameters] == [10 ** i * step for i in range(4)]


def check_groups_that_leave_some_out_and_tuples_of_them():
    for groups in (lambda m: [list(m[0].parameters())], lambda m: [tuple(m[4].parameters()), [m[0].weight]],
                   lambda m: [[]], lambda m: [], lambda m: 3):
        model, reference = make_model(), make_model()
        train(model, hvd.DistributedOptimizer(sgd(model), groups=groups(model)), 2)
        train_alone(reference, sgd(reference), 2)
        expect_equal(model, reference)
    model = make_model()
    for wrong in (0, -1, 1.5, "2", tuple(model.parameters()), [[1]], [model[0].weight], {0: []},
                  [[model[0].weight], [model[0].weight]]):
        with pytest.raises(ValueError, match="groups"):
            hvd.DistributedOptimizer(sgd(model), groups=wrong)


def check_predivide_factors():
    for factor in (0.5, 1.0, 3.0, float(hvd.size())):
        model, optimizer, reference, plain = pair(gradient_predivide_factor=factor)
        train(model, optimizer, 2)
        train_alone(reference, plain, 2)
        expect_equal(model, reference)


def check_every_op():
    """The gradient of a rank is its number plus one."""
    numbers = torch.arange(1.0, 1 + hvd.size())
    for op, expected in (("Average", numbers.mean()), ("Sum", numbers.sum()), ("Min", numbers.min()),
                         ("Max", numbers.max()), ("Product", numbers.prod())):
        if hvd.size() > 1:
            parameter = torch.nn.Parameter(torch.zeros(3))
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), op=getattr(hvd, op))
            (parameter * (1 + hvd.rank())).sum().backward()
            optimizer.step()
            torch.testing.assert_close(parameter.detach(), -expected.expand(3))
    for wrong in (None, 6, -1, "sum"):
        with pytest.raises(ValueError, match="op must be"):
            hvd.DistributedOptimizer(sgd(make_model()), op=wrong)
    for op in (hvd.Sum, hvd.Adasum, hvd.Max):
        with pytest.raises(ValueError, match="gradient_predivide_factor"):
            hvd.DistributedOptimizer(sgd(make_model()), op=op, gradient_predivide_factor=2.0)


def check_wrong_passes():
    for wrong in (0, -2):
        with pytest.raises(ValueError, match="backward_passes_per_step"):
            hvd.DistributedOptimizer(sgd(make_model()), backward_passes_per_step=wrong)


# State and copies

def check_state_dict_is_the_plain_ones():
    model, optimizer, reference, plain = pair()
    train(model, optimizer, 2)
    train_alone(reference, plain, 2)
    mine, theirs = optimizer.state_dict(), plain.state_dict()
    assert mine["param_groups"] == theirs["param_groups"]
    assert list(mine["state"]) == list(theirs["state"])
    file = io.BytesIO()
    torch.save(mine, file)
    file.seek(0)
    alone = make_model()
    alone.load_state_dict(model.state_dict())
    resumed = sgd(alone)
    resumed.load_state_dict(torch.load(file))
    train_alone(alone, resumed, 1)
    train(model, optimizer, 1)
    expect_equal(model, alone)


def copies(model, optimizer):
    yield copy.deepcopy((model, optimizer))
    yield pickle.loads(pickle.dumps((model, optimizer)))
    file = io.BytesIO()
    torch.save((model, optimizer), file)
    file.seek(0)
    yield torch.load(file, weights_only=False)


def check_copies_train_on_their_own():
    groups = [[0, 1], [4]]
    for options in ({}, {"groups": 2, "compression": hvd.Compression.none}, {"groups": groups},
                    {"backward_passes_per_step": 2}, {"gradient_predivide_factor": 2.0}):
        model, reference = make_model(), make_model()
        if options.get("groups") is groups:
            options = {"groups": [[list(model.parameters())[i] for i in group] for group in groups]}
        optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), **options)
        plain = sgd(reference)
        passes = options.get("backward_passes_per_step", 1)
        train(model, optimizer, 2, passes)
        train_alone(reference, plain, 2, passes)
        others = list(copies(model, optimizer))
        train(model, optimizer, 1, passes)
        train_alone(reference, plain, 1, passes)
        expect_equal(model, reference)
        for other, its_optimizer in others:
            assert type(its_optimizer).__name__ == "SGD" and isinstance(its_optimizer, torch.optim.SGD)
            assert list(its_optimizer._parameter_names.values()) == list(optimizer._parameter_names.values())
            train(other, its_optimizer, 1, passes)
            expect_equal(other, reference)


def check_copies_keep_the_process_set():
    if hvd.size() == 1:
        return
    process_set = hvd.add_process_set([0])
    model = make_model()
    optimizer = hvd.DistributedOptimizer(sgd(model), process_set=process_set)
    for _, other in list(copies(model, optimizer)):
        assert other._process_set is process_set
    hvd.remove_process_set(process_set)


# Several optimizers

@pytest.mark.parametrize("named", [True, False], ids=["named", "unnamed"])
@pytest.mark.parametrize("groups", [None, 1])
def check_two_models_of_equal_names_in_one_backward(named, groups):
    pairs = []
    for i in range(2):
        model, reference = make_model(), make_model()
        with torch.no_grad():
            for p in (*model.parameters(), *reference.parameters()):
                p.mul_(1 + i)
        pairs.append((model, hvd.DistributedOptimizer(sgd(model), model.named_parameters() if named else None,
                                                      groups=groups), reference, sgd(reference)))
    for step in range(3):
        for _, optimizer, _, plain in pairs:
            optimizer.zero_grad()
            plain.zero_grad()
        sum(my_loss(model, step) * (1 + i) for i, (model, _, _, _) in enumerate(pairs)).backward()
        for i, (_, optimizer, reference, plain) in enumerate(pairs):
            (loss_of(reference, *data(step)) * (1 + i)).backward()
            plain.step()
            optimizer.step()
    for model, _, reference, _ in pairs:
        expect_equal(model, reference)


def check_two_networks_against_each_other():
    """Each has its optimizer; one is frozen while the other learns."""
    def make():
        torch.manual_seed(6)
        return torch.nn.Linear(5, 5), torch.nn.Linear(5, 1)

    def learn(networks, optimizers, who, x):
        for network, mine in zip(networks, who):
            network.requires_grad_(mine)
        for optimizer in optimizers:
            optimizer.zero_grad()
        networks[1](networks[0](x)).square().mean().backward()
        for network, optimizer, mine in zip(networks, optimizers, who):
            assert all((p.grad is not None) == mine for p in network.parameters())
            if mine:
                optimizer.step()

    networks, references = make(), make()
    optimizers = [hvd.DistributedOptimizer(torch.optim.SGD(n.parameters(), lr=0.1), n.named_parameters())
                  for n in networks]
    plains = [torch.optim.SGD(n.parameters(), lr=0.1) for n in references]
    for step in range(3):
        x, _ = data(step)
        for who in ((True, False), (False, True)):
            learn(networks, optimizers, who, x.chunk(hvd.size())[hvd.rank()])
            learn(references, plains, who, x)
    for network, reference in zip(networks, references):
        expect_equal(network, reference)


def check_two_optimizers_over_parts_of_one_model():
    model, reference = make_model(), make_model()
    parts = slice(0, 2), slice(2, 5)
    mine = [hvd.DistributedOptimizer(OPTIMIZERS[kind](model[part].parameters()), model.named_parameters())
            for kind, part in zip(("SGD", "Adam"), parts)]
    theirs = [OPTIMIZERS[kind](reference[part].parameters()) for kind, part in zip(("SGD", "Adam"), parts)]
    for step in range(3):
        for optimizer in (*mine, *theirs):
            optimizer.zero_grad()
        my_loss(model, step).backward()
        loss_of(reference, *data(step)).backward()
        for optimizer in (*mine, *theirs):
            optimizer.step()
    expect_equal(model, reference)
