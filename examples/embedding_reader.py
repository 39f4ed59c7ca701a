"""Serves what lightcc.torch.embedding has exported, with NumPy alone: a dictionary from keys to rows.

python examples/embedding_reader.py FOLDER TABLE KEY [KEY ...]

FOLDER has an export (E.export) and perhaps deltas with weights only that follow it (E.save_delta, weights_only=True).
"""
import glob
import json
import os
import sys

import numpy


def read_export(folder, table):
    """The manifest's words about the table, and its rows by key."""
    with open(os.path.join(folder, "export.json")) as file:
        about = json.load(file)["tables"][table]
    rows: dict = {}
    for part in about["files"]:
        with numpy.load(os.path.join(folder, part["file"])) as columns:
            rows.update(zip(columns["key"].tolist(), columns["weight"]))
    return about, rows


def read_safetensors(path):
    """The format: the header's length in 8 bytes, the header as JSON, and the columns' bytes."""
    dtypes = {"F32": "<f4", "F64": "<f8", "I64": "<i8", "U32": "<u4", "U64": "<u8"}
    with open(path, "rb") as file:
        data = file.read()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    header.pop("__metadata__", None)
    return {name: numpy.frombuffer(data[end + of["data_offsets"][0]:end + of["data_offsets"][1]],
                                   dtypes[of["dtype"]]).reshape(of["shape"]) for name, of in header.items()}


def apply_deltas(folder, table, about, rows):
    """Those that follow the export, in order; the number of the last one."""
    save, number = about["history"] or ("none", 0)
    for path in sorted(glob.glob(os.path.join(folder, f"delta-{save}-*.json"))):
        with open(path) as file:
            manifest = json.load(file)
        if manifest["sequence"] <= number:
            continue
        assert manifest["sequence"] == number + 1, f"delta {number + 1} is missing"
        parts = [read_safetensors(os.path.join(folder, shard["file"])) for shard in manifest["shards"]]
        for part in parts:
            for key in part[f"{table}.gone"].tolist():
                rows.pop(key, None)
        for part in parts:
            rows.update(zip(part[f"{table}.key"].tolist(), part[f"{table}.weight"]))
        number += 1
    return number


def main():
    folder, table, *keys = sys.argv[1:]
    about, rows = read_export(folder, table)
    number = apply_deltas(folder, table, about, rows)
    print(f"{len(rows)} rows of {table} after delta {number}")
    for key in map(int, keys):
        row = rows.get(key, numpy.full(about["dim"], about["absent"]))
        print(key, *(f"{value:.9g}" for value in row))


if __name__ == "__main__":
    main()
