"""Compression.topk, int8 and int4 as values: what they take, which gradients they are for, who refuses them."""
import copy
import pickle
import warnings

import numpy as np
import pytest
import torch

import lightcc.torch as hvd
from lightcc.compress import residuals
from lightcc.compress.compressors import CoreCompressor, Int8, TopK
from lightcc.torch import ddp

pytestmark = pytest.mark.usefixtures("job")


def by_name(name, tensor):
    return name == "mine"


VALUES = (hvd.Compression.topk(), hvd.Compression.topk(0.02, True, 10, 0.9, by_name), hvd.Compression.int8(),
          hvd.Compression.int8(by_name), hvd.Compression.int4(), hvd.Compression.int4(by_name))


def test_values():
    for i, one in enumerate(VALUES):
        for j, other in enumerate(VALUES):
            assert (one == other) == (i == j)
        for same in (copy.copy(one), copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
            assert same == one and hash(same) == hash(one) and same is not one
            assert repr(same) == repr(one)
        assert one.compress("a tensor") == ("a tensor", None) and one.decompress("a tensor", None) == "a tensor"
    assert isinstance(VALUES[0], TopK) and isinstance(VALUES[2], Int8)
    assert VALUES[0] != hvd.Compression.none and VALUES[0] != TopK
    assert repr(hvd.Compression.topk(0.05)) == ("Compression.topk(ratio=0.05, fp16=False, warmup_steps=0, "
                                                "momentum_correction=None, dense=None)")


@pytest.mark.parametrize("options, text", [
    ({"ratio": 0}, "ratio=0"), ({"ratio": 1.5}, "ratio=1.5"), ({"ratio": -0.1}, "ratio"),
    ({"ratio": float("nan")}, "ratio=nan"), ({"ratio": "a lot"}, "ratio='a lot': give a number"),
    ({"warmup_steps": -1}, "warmup_steps=-1"), ({"warmup_steps": 1.5}, "warmup_steps=1.5"),
    ({"warmup_steps": 1 << 40}, "warmup_steps"), ({"warmup_steps": None}, "warmup_steps=None"),
    ({"momentum_correction": 1.0}, "momentum_correction=1.0"), ({"momentum_correction": -0.1}, "momentum_correction"),
    ({"dense": ["bias"]}, "dense=")])
def test_wrong_options(options, text):
    with pytest.raises(ValueError, match=text):
        hvd.Compression.topk(**options)


@pytest.mark.parametrize("scale", (0, -1.0, float("inf"), float("nan"), "large", None))
def test_wrong_loss_scales(scale):
    compression = hvd.Compression.int8()
    with pytest.raises(ValueError, match="loss_scale"):
        compression.loss_scale = scale
    compression.loss_scale = lambda: scale
    with pytest.raises(ValueError, match="loss_scale"):
        compression.scale()


def test_loss_scales_are_part_of_the_value():
    one, other = hvd.Compression.topk(), hvd.Compression.topk()
    other.loss_scale = 8
    assert one != other and other.scale() == 8.0 and copy.deepcopy(other).scale() == 8.0


@pytest.mark.parametrize("name, shape, dtype, expected", [
    ("w", (64, 64), "float32", True), ("w", (64, 63), "float32", False), ("w", (128, 64), "float16", True),
    ("w", (128, 63), "bfloat16", False), ("w", (1 << 20,), "float32", False), ("w", (), "float32", False),
    ("w", (64, 64), "float64", False), ("w", (64, 64), "int32", False), ("w", (4, 4, 16, 16), "float32", True),
    ("wordEmbedding.w", (64, 64), "float32", False), ("mine", (64, 64), "float32", False)])
def test_which_gradients_are_compressed(name, shape, dtype, expected):
    for compression in (hvd.Compression.topk(dense=by_name), hvd.Compression.int8(by_name)):
        assert compression.is_compressed(name, shape, dtype) == expected


def weight():
    return torch.nn.Parameter(torch.zeros(64, 64))


@pytest.mark.parametrize("compression", VALUES[::2], ids=repr)
def test_what_has_no_such_compression(compression):
    tensor = torch.ones(64, 64)
    for op in (hvd.Adasum, hvd.Min, hvd.Max, hvd.Product):
        with pytest.raises(ValueError, match="op=Average"):
            hvd.DistributedOptimizer(torch.optim.SGD([weight()], lr=1.0), compression=compression, op=op)
        with pytest.raises(ValueError, match="op must be Average or Sum"):
            hvd.allreduce(tensor, name="w", op=op, compression=compression)
    for call in (lambda: hvd.allreduce(tensor, compression=compression),
                 lambda: hvd.grouped_allreduce([tensor], compression=compression)):
        with pytest.raises(ValueError, match="needs a name"):
            call()
    for call in (lambda: hvd.reducescatter(tensor, name="w", compression=compression),
                 lambda: hvd.grouped_reducescatter([tensor], name="w", compression=compression),
                 lambda: ddp.Options(compression=compression)):
        with pytest.raises(ValueError, match="is for optimizers"):
            call()


@pytest.mark.parametrize("make, warned", [
    (torch.optim.AdamW, True), (torch.optim.NAdam, True), (torch.optim.RMSprop, True), (torch.optim.Adagrad, True),
    (torch.optim.SGD, False), (torch.optim.Adadelta, False)])
def test_adaptive_optimizers_are_warned_of(make, warned):
    for compression, expected in ((VALUES[0], warned), (VALUES[2], False), (hvd.Compression.fp16, False)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            hvd.DistributedOptimizer(make([weight()], lr=0.1), compression=compression)
        texts = [str(one.message) for one in caught]
        assert len(texts) == expected and (not expected or make.__name__ in texts[0])
        assert not expected or caught[0].filename == __file__


def test_a_rank_alone_sends_nothing():
    parameter = weight()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), compression=VALUES[0])
    parameter.sum().backward()
    optimizer.step()
    assert torch.equal(parameter.detach(), torch.full((64, 64), -1.0))
    assert sorted(optimizer.state_dict()) == ["param_groups", "state"]
    assert hvd.compression_stats(optimizer)["dense"] == "this rank exchanges no gradients"
    assert hvd.gather_residuals(optimizer) is None
    for wrong in (torch.optim.SGD([parameter], lr=1.0), 7):
        with pytest.raises(ValueError, match="give a DistributedOptimizer"):
            hvd.compression_stats(wrong)


def test_a_user_may_still_make_a_compressor_of_any_class():
    assert not issubclass(hvd.Compression.fp16, CoreCompressor)
    compressions = {hvd.Compression.none, hvd.Compression.fp16, VALUES[0]}
    assert hvd.Compression.topk() in compressions and hvd.Compression.topk(0.5) not in compressions


def test_what_is_missing_in_a_checkpoint():
    piece = {"node": 0, "part": 0, "first": 0, "values": np.zeros(25, np.float32)}
    tensor = {"elements": 100, "steps": 1, "nodes": 2, "pieces": [piece, {**piece, "part": 1}]}
    everything = hvd.global_process_set

    def missing(ranks, size):
        return residuals.missing({"ranks": ranks, "size": size, "tensors": {"w": tensor}}, everything)
    assert missing([0], 1) == "" and missing([0, 1, 2], 3) == ""
    assert missing([1], 8).startswith("1 of 8 ranks have saved it: 88 % of what")
    assert "begins at zero" in residuals.missing(None, everything)
