"""Shard files: what is written in slices is a file of safetensors, and what is no whole file of these is refused."""
import importlib.util
import os

import numpy as np
import pytest

from lightcc.embedding.shard_file import ShardReader, ShardWriter

COLUMNS = {"key": (np.uint64, (1000,)), "weight": (np.float32, (1000, 3)), "step": (np.uint32, (1000,)),
           "none": (np.float64, (0, 4))}


def values():
    rng = np.random.default_rng(1)
    return {name: rng.integers(0, 1 << 31, shape).astype(dtype) for name, (dtype, shape) in COLUMNS.items()}


@pytest.fixture
def file(tmp_path):
    path = str(tmp_path / "shard.safetensors")
    writer = ShardWriter(path, COLUMNS, {"save": "abc"})
    for name, rows in values().items():
        for first in range(0, len(rows), 300):
            writer.write(name, first, rows[first:first + 300])
    writer.close()
    assert os.path.getsize(path) == writer.bytes
    return path


def test_slices_come_back(file):
    reader = ShardReader(file)
    assert reader.metadata == {"save": "abc"}
    for name, rows in values().items():
        assert np.array_equal(reader.read(name, 0, len(rows)), rows)
        assert np.array_equal(reader.read(name, len(rows) // 2, len(rows) // 4),
                              rows[len(rows) // 2:len(rows) // 2 + len(rows) // 4])


@pytest.mark.skipif(not importlib.util.find_spec("safetensors"), reason="missing: safetensors")
def test_the_package_safetensors_reads_it(file):
    import safetensors
    import safetensors.numpy
    tensors = safetensors.numpy.load_file(file)
    assert tensors.keys() == COLUMNS.keys()
    assert all(np.array_equal(tensors[name], rows) for name, rows in values().items())
    with safetensors.safe_open(file, "numpy") as opened:
        assert opened.metadata() == {"save": "abc"}


@pytest.mark.parametrize("keep", [0, 5, 8, 100, -1])
def test_a_truncated_file_is_refused(file, keep):
    with open(file, "rb") as whole:
        data = whole.read()
    with open(file, "wb") as cut:
        cut.write(data[:keep])
    with pytest.raises(ValueError, match="truncated|only the beginning"):
        ShardReader(file)


@pytest.mark.parametrize("data", [b"PK\3\4" + bytes(200), (2).to_bytes(8, "little") + b"[]",
                                  (8).to_bytes(8, "little") + b'{"a": 1}', (4).to_bytes(8, "little") + b"\xff\xfe{}"])
def test_a_foreign_file_is_refused(tmp_path, data):
    path = tmp_path / "foreign"
    path.write_bytes(data)
    with pytest.raises(ValueError, match="foreign is no safetensors file"):
        ShardReader(str(path))


def test_more_bytes_than_the_header_says(file):
    with open(file, "ab") as more:
        more.write(b"x")
    with pytest.raises(ValueError, match="1 bytes more"):
        ShardReader(file)


def test_what_is_asked_for_is_there(file):
    with pytest.raises(ValueError, match="has no 'count'"):
        ShardReader(file).read("count", 0, 1)
    with pytest.raises(ValueError, match="has 1000 rows, not 1001"):
        ShardReader(file).read("key", 1, 1000)


def test_an_abandoned_file_is_gone(tmp_path):
    writer = ShardWriter(str(tmp_path / "shard"), COLUMNS, {})
    writer.abandon()
    assert not os.listdir(tmp_path)
