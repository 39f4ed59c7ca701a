"""What compression has left behind, in the state of an optimizer: saved, restored on other nodes, or not there."""
import copy
import io
import logging
import pickle

import pytest
import torch
from compressed import COMPRESSED, Training, begin, end

import lightcc.torch as hvd
import ranks
from lightcc.compress.residuals import KEY

pytestmark = pytest.mark.usefixtures("job")
TOPK = hvd.Compression.topk(0.01)


@pytest.mark.parametrize("np", (2, 4))
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


@pytest.fixture(autouse=True)
def two_nodes(job):
    begin(hvd.size() // 2)
    yield
    end()
    hvd.init()


def saved_and_loaded(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def restored(training, state, compression=TOPK, **options):
    """The training goes on from a checkpoint, under another optimizer."""
    other = Training(compression, **options)
    other.optimizer.load_state_dict(state)
    other.delivered, other.dense, other.step_number = training.delivered, training.dense, training.step_number
    return other


@pytest.mark.parametrize("intra", (2, 1, 3))
@pytest.mark.parametrize("groups", (None, 1))
def check_all_of_it_goes_on_with_other_nodes(intra, groups):
    if intra >= hvd.size():
        pytest.skip("that is one node")
    training = Training(TOPK).steps(4)
    hvd.gather_residuals(training.optimizer)
    state = saved_and_loaded(training.optimizer.state_dict())
    before = training.left()
    begin(intra)
    other = restored(training, state, groups=groups)
    assert all(torch.equal(left, before[name]) for name, left in other.left().items()), "not before the next step"
    other.steps(3).expect_equal_bits()
    other.expect_total()
    assert set(hvd.gather_residuals(other.optimizer)["tensors"]) == set(COMPRESSED)


def check_one_node_goes_on_without():
    training = Training(TOPK).steps(4)
    hvd.gather_residuals(training.optimizer)
    state = training.optimizer.state_dict()
    begin(0)
    other = Training(TOPK)
    other.optimizer.load_state_dict(state)
    other.steps(2).expect_equal_bits()
    assert all(torch.equal(other.delivered[name], other.dense[name]) for name in COMPRESSED)
    assert "host" in hvd.compression_stats(other.optimizer)["dense"]


def check_each_rank_loads_its_own(caplog):
    training = Training(TOPK).steps(4)
    state = saved_and_loaded(training.optimizer.state_dict())
    assert state[KEY]["ranks"] == [hvd.rank()] and state[KEY]["size"] == hvd.size()
    other = restored(training, state)
    other.steps(2).expect_total()
    assert not caplog.records


def check_what_rank_0_alone_has_saved(caplog):
    training = Training(hvd.Compression.topk(0.01, warmup_steps=20)).steps(4)
    state = hvd.broadcast_object(training.optimizer.state_dict(), 0)
    other = restored(training, state, hvd.Compression.topk(0.01, warmup_steps=20))
    texts = [record.getMessage() for record in caplog.records]
    if hvd.rank() == 0:
        assert texts == []
    else:
        assert len(texts) == 1 and f"1 of {hvd.size()} ranks have saved it: {100 - 100 // hvd.size()} %" in texts[0]
    before = {name: total.clone() for name, total in training.delivered.items()}
    other.steps(3).expect_equal_bits()
    left, kept = other.left(), 0
    for name in COMPRESSED:
        lost = other.dense[name] - other.delivered[name] - left[name]
        assert (lost != 0).any() and not torch.equal(before[name], other.delivered[name])
        kept += (lost == 0).sum().item() / lost.numel()
    assert kept > 0.2 * len(COMPRESSED)


def check_a_file_without(caplog):
    plain = Training(hvd.Compression.none).steps(2)
    state = plain.optimizer.state_dict()
    assert KEY not in state
    with caplog.at_level(logging.INFO, "lightcc"):
        training = Training(TOPK).steps(2)
        training.optimizer.load_state_dict(state)
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert not any(left.any() for left in training.left().values()), "what was there before belongs to other weights"
    training.steps(1)
    assert hvd.compression_stats(training.optimizer)["gradient_bytes"] > 0


def check_other_optimizers_take_the_file(caplog):
    training = Training(TOPK, make=lambda *args, lr: torch.optim.SGD(*args, lr=lr, momentum=0.9)).steps(2)
    with training.optimizer.skip_synchronize():
        training.optimizer.step()
    hvd.gather_residuals(training.optimizer)
    state = training.optimizer.state_dict()
    plain = torch.optim.SGD([torch.nn.Parameter(p.detach().clone()) for p in training.parameters.values()], lr=0.5)
    plain.load_state_dict(saved_and_loaded(state))
    assert plain.param_groups[0]["momentum"] == 0.9 and KEY not in plain.state_dict()
    assert len(plain.state) == len(training.parameters)
    for copied in (copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
        assert copied[KEY]["tensors"].keys() == state[KEY]["tensors"].keys()
        assert all(torch.equal(a["values"], b["values"]) for name in COMPRESSED for a, b in
                   zip(copied[KEY]["tensors"][name]["pieces"], state[KEY]["tensors"][name]["pieces"]))
    fewer = Training(TOPK, names=("a.weight", "a.bias"))
    fewer.optimizer.load_state_dict({**fewer.optimizer.state_dict(), KEY: state[KEY]})
    fewer.step()
    assert "b.weight, odd.weight" in caplog.text


def check_a_broadcast_leaves_it_alone():
    training = Training(TOPK).steps(3)
    before = training.left()
    hvd.broadcast_optimizer_state(training.optimizer, 0)
    assert all(torch.equal(left, before[name]) for name, left in training.left().items())
    training.step().expect_total()


def check_momentum_is_saved():
    compression = hvd.Compression.topk(0.01, momentum_correction=0.5)
    training = Training(compression).steps(3)
    hvd.gather_residuals(training.optimizer)
    state = training.optimizer.state_dict()
    assert {piece["part"] for piece in state[KEY]["tensors"]["a.weight"]["pieces"]} == {0, 1}
    expected = [training.step().grads().clone() for _ in range(3)]
    other = Training(compression)
    other.optimizer.load_state_dict(saved_and_loaded(state))
    other.step_number = 3
    assert all(torch.equal(other.step().grads(), one) for one in expected)


def check_a_copy_is_an_optimizer_of_its_own():
    training = Training(TOPK).steps(2)
    copied = copy.deepcopy(training.optimizer)
    assert copied._compression == TOPK
    assert copied._reducer.compressed._codec.id != training.optimizer._reducer.compressed._codec.id
    training.step().expect_total()


def check_it_outlives_an_epoch():
    training = Training(TOPK).steps(3)
    hvd.shutdown()
    state = training.optimizer.state_dict()
    assert state[KEY]["ranks"] == [training.optimizer._reducer.compressed._me[0]]
    hvd.init()
    training.steps(2).expect_total()


def check_gathering_at_the_wrong_time():
    training = Training(TOPK).steps(1)
    for wrong in (None, torch.optim.SGD([torch.ones(1)], lr=1.0)):
        with pytest.raises(ValueError, match="give a DistributedOptimizer"):
            hvd.gather_residuals(wrong)
    training.backward()
    with pytest.raises(ValueError, match="on their way"):
        hvd.gather_residuals(training.optimizer)
    training.optimizer.synchronize()
    gathered = hvd.gather_residuals(training.optimizer)
    assert gathered["ranks"] == training.ranks and training.optimizer.state_dict()[KEY] is gathered
    training.step()
    assert training.optimizer.state_dict()[KEY]["ranks"] == [hvd.rank()], "of the step before"
