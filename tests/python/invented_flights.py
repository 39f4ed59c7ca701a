"""Flights as examples/flights.py reads them: of ten days, of which those of one carrier are late."""
import zipfile
from pathlib import Path

import numpy

FLIGHTS = 1500
_COLUMNS = "year,month,day,sched_dep_time,arr_delay,carrier,flight,tailnum,origin,dest,hour"


def write(folder: Path) -> Path:
    """Writes flights.csv.zip into the folder, and returns that."""
    random = numpy.random.default_rng(1)
    lines = [_COLUMNS]
    for i in range(FLIGHTS):
        carrier, hour = random.integers(4), random.integers(5, 23)
        delay = 40 if carrier == 1 else random.integers(-20, 20)
        lines.append(f"2013,1,{1 + i * 10 // FLIGHTS},{100 * hour},{delay},C{carrier},{random.integers(90)},"
                     f"N{random.integers(70)},JFK,D{random.integers(20)},{hour}")
    lines.append("2013,1,10,2300,NA,C1,1,N1,JFK,D1,23")  # it never arrived
    with zipfile.ZipFile(folder / "flights.csv.zip", "w") as archive:
        archive.writestr("flights.csv", "\n".join(lines) + "\n")
    return folder
