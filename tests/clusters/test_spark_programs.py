"""The program of docs/clusters.md about Spark, as it is there."""
import sys

import programs

NEEDS = "pyspark"


def test_program(tmp_path):
    said = r"\[0\]<stdout>:the loss is [\d.]+\n(.*\n)*\[[\d.]+, [\d.]+\]\n(.*\n)*[\d.]+\n"
    programs.run("Spark", said, tmp_path, PYSPARK_PYTHON=sys.executable, SPARK_LOCAL_IP="127.0.0.1")
