"""`Experiment`: what commands, tables, the page and the docs read about an experiment."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from geoparam_lab.experiments.papers import RATES, PaperTable, Printed
from geoparam_lab.run_folder import Record, Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Config = Mapping[str, Any]
Drawings = dict[str, tuple[Callable[[], "Figure"], str]]  # by name: what draws it, a caption


@dataclass(frozen=True)
class Measure:
    """A number in the records that a table shows."""

    name: str  # its field in a record
    title: str
    digits: int | None = 3  # the fewest decimals; None for three significant digits, or as it is
    better: str = ""  # "lower" or "higher"; empty where neither is


RMSE = Measure("test_rmse", "Test RMSE", 3, "lower")
ACCURACY = Measure("test_accuracy", "Test accuracy", 3, "higher")
TOP1 = Measure("top1", "Top-1 accuracy (%)", 2, "higher")
TOP5 = Measure("top5", "Top-5 accuracy (%)", 2, "higher")
LARGEST_MOVE = Measure("largest_move", "largest move, running statistics", None)
DETAILS = (
    Measure("select_top1", "top-1 on images kept back (%)", 2),
    Measure("tries", "settings tried", 0),
    Measure("epochs", "epochs", 0),
)


@dataclass(frozen=True)
class Layout:
    """A table of an experiment; a row is a method, at one value of each key."""

    measures: tuple[Measure, ...]  # means with their errors, beside the papers' numbers
    # Fields that tell rows of one method apart, and their headings; the first one's values are the
    # columns of the papers' tables.
    keys: Mapping[str, str] = field(default_factory=dict)
    where: Mapping[str, Any] = field(default_factory=dict)  # what records must have to be in it
    compare: bool = True  # whether ranges and the differences to a baseline are shown
    details: tuple[Measure, ...] = DETAILS  # shown besides, without errors
    title: str = ""  # where the experiment has several tables
    notes: tuple[str, ...] = ()  # what a reader must know besides


@dataclass(frozen=True)
class Slider:
    """Training frame by frame, for the page; the arrays are in curves/slider_NAME.npz."""

    text: str  # what a reader sees in it
    strips: Mapping[str, str]  # arrays (seeds, methods, frames) drawn as curves; their titles


@dataclass(frozen=True)
class Experiment:
    """An experiment: its command, its tables, and what the page says of it.

    `run` does it and returns the run's folder. Its arguments are the command's options, and its
    docstring has their help. All take `out`, the folder; `resume`, to go on with the run there;
    `command`, what a user types to do it again; and `progress`, called with a title, how much is
    done and how much there is.
    """

    name: str  # of its command, and in config.json
    title: str = ""  # its heading on the page
    about: str = ""  # what it is, for the page
    summary: str = ""  # what it is and how long it takes, for the command's help
    run: Callable[..., Run | None] | None = None
    settings: type | None = None  # a dataclass whose fields are options too, taken by keyword
    layouts: tuple[Layout, ...] = (Layout((RMSE, ACCURACY, TOP1, TOP5)),)
    papers: Mapping[str, PaperTable] = field(default_factory=dict)  # what they print, by measure
    rates: Mapping[str, float] = field(default_factory=RATES.copy)  # the papers', by method
    papers_fields: Mapping[str, Any] = field(default_factory=dict)  # fields of the papers' runs
    baseline: str = "sp"  # the method that others are compared with
    names: Mapping[Any, str] = field(
        default_factory=dict
    )  # what tables call some methods and values
    slider: Slider | None = None
    finding: Callable[[Run], str] = lambda run: ""  # says what was found, from a run's records
    limits: Callable[[Run], str] = lambda run: ""  # says what the results do not show
    epochs: int = 0  # the papers' number of epochs; a run with fewer is reported as cut short
    retitle: Callable[[Config], str] = lambda config: ""  # a title for a run's config
    mismatch: Callable[[Config], str] = lambda config: ""  # why the papers' problem is another
    remarks: Callable[[Config], Iterable[str]] = lambda config: ()  # notes below the tables
    choose: Callable[[Sequence[Record]], Sequence[Record]] = lambda records: records  # for tables

    def find_printed(self, measure: str, method: str, column: object = "") -> Printed | None:
        """Return what the papers print for a method in a column of a table, or None."""
        table = self.papers.get(measure)
        return table.values.get(str(column), {}).get(method) if table else None

    def describe_limits(self, run: Run) -> str:
        """Return what a run's results do not show."""
        said = self.limits(run)
        if cut := self.explain_cut(run.config):
            said = f"{self.title}: {cut}"
        reason = self.mismatch(run.config)
        if not reason:
            return said
        if not said:
            return f"{self.make_title(run.config)}: {reason[:1].lower()}{reason[1:]}."
        return f"{said} {reason}."

    def explain_cut(self, config: Config) -> str:
        """Say that there were fewer epochs than the papers'; empty where there were not."""
        epochs = config.get("epochs")
        is_cut = isinstance(epochs, int) and epochs < self.epochs
        return "training was cut short here, so its results say little." if is_cut else ""

    def make_title(self, config: Config) -> str:
        """Return what a run with this configuration is called."""
        return self.retitle(config) or self.title


def list_in_words(values: Iterable[Any]) -> str:
    """Return values as a list in a sentence.

    Example:
        >>> list_in_words(["SP", "WN", "BN"])
        'SP, WN and BN'
    """
    *others, last = map(str, values)
    return f"{', '.join(others)} and {last}" if others else last
