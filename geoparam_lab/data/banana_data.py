"""The Banana classification in two dimensions: KEEL's points, or ours where those are missing.

The papers take 1,000 of KEEL's 5,300 points at random, and of these 200 for the test; both draws
are here the very ones of their notebook (seed 0 of numpy's old generator, then scikit-learn's
split). With the generator of `data.synthetic` the demo needs neither file nor network; `source`
says which it was.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from geoparam_lab.checks import check_names
from geoparam_lab.data import synthetic, table_files
from geoparam_lab.data.splits import split, standardise

POINTS = 1000
SOURCES = ("auto", "KEEL", "generated")
KEEL = table_files.Table(
    "banana",
    rows=5300,
    columns=3,
    checksum="d427d1ec6395c7db",
    files=("banana.dat", "2d_banana.csv", "banana.zip"),
    urls=(
        "https://sci2s.ugr.es/keel/dataset/data/classification/banana.zip",
        "https://raw.githubusercontent.com/Wenlin-Chen/geometric-parameterization/"
        "0c48483a1089c16183308216a990f4235219a0ca/2d_banana/2d_banana.csv",
    ),
)


class Banana(NamedTuple):
    """Inputs (points, 2), classes 0 and 1 (points,), in float64, and where they come from."""

    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    source: str
    x_val: np.ndarray | None = None  # where a part of the training points is held out
    y_val: np.ndarray | None = None


def load(data: str | Path | None = None, source: str = "KEEL") -> Banana:
    """Return 800 training and 200 test points, standardised on the training part.

    "KEEL" are those of KEEL's file, in a folder, in $GEOPARAM_DATA or in the cache, or else
    downloaded; "generated" are as many of `synthetic.banana`; "auto" are KEEL's, or generated ones
    where these cannot be had and no folder is given.
    """
    check_names("source", SOURCES, source)
    if source == "generated" and data is not None:
        raise ValueError("generated points are read from no folder: leave data out, or source.")
    if source == "auto":
        try:
            return load(data, "KEEL")
        except FileNotFoundError:
            if data is not None:
                raise
            return load(source="generated")
    if source == "KEEL":
        table = table_files.load(KEEL, data)
        drawn = table[np.random.RandomState(0).choice(len(table), POINTS, replace=False)]
        x, y = drawn[:, :2], (drawn[:, 2] + 1) / 2
    else:
        x, y = synthetic.banana(0, POINTS)
    train, test = split(POINTS, seed=0)
    x_train, x_test = standardise(x[train], x[test])
    return Banana(x_train, y[train], x_test, y[test], source)
