"""One record for each experiment, which commands, tables, the page and the docs all read."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from geoparam_lab.experiments import papers
from geoparam_lab.experiments.papers import PaperTable, Printed
from geoparam_lab.run_folder import Record, Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Config = Mapping[str, Any]
Drawings = dict[str, tuple[Callable[[], "Figure"], str]]  # by name: what draws it, a caption


@dataclass(frozen=True)
class Measure:
    """A number in the records that a table shows.

    Args:
        name: its field in a record.
        title: what it is.
        digits: the fewest decimals to show; None for three significant digits, or in a table of
            fields for those that the number has.
        better: "lower" or "higher"; empty where neither is.
    """

    name: str
    title: str
    digits: int | None = 3
    better: str = ""


RMSE = Measure("test_rmse", "Test RMSE", 3, "lower")
ACCURACY = Measure("test_accuracy", "Test accuracy", 3, "higher")
TOP1 = Measure("top1", "Top-1 accuracy (%)", 2, "higher")
TOP5 = Measure("top5", "Top-5 accuracy (%)", 2, "higher")
LARGEST_MOVE = Measure("largest_move", "largest move, running statistics", None)
LARGEST_TURN = Measure("largest_rotation", "largest turn (°)", None)
DETAILS = (
    Measure("select_top1", "top-1 on images kept back (%)", 2),
    Measure("tries", "settings tried", 0),
    Measure("epochs", "epochs", 0),
    Measure("best_epoch", "best epoch", 0),
)


@dataclass(frozen=True)
class Layout:
    """How some tables of an experiment are laid out; rows are methods.

    Args:
        measures: one table each.
        column: the field whose values are the columns; empty where there is one column.
        column_title: what these are.
        group: a field whose values are in separate tables.
        where: what records must have in some fields to be in these tables.
        compare: whether the differences to a baseline are shown.
        details: what else is known of a run, shown where there is one column.
        fields: what to show side by side instead of measures, where each row is one record.
        title: of the table of these.
        notes: what a reader must know besides.
    """

    measures: tuple[Measure, ...] = ()
    column: str = ""
    column_title: str = ""
    group: str = ""
    where: Mapping[str, Any] = field(default_factory=dict)
    compare: bool = True
    details: tuple[Measure, ...] = DETAILS
    fields: tuple[Measure, ...] = ()
    title: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Slider:
    """Training frame by frame, for the page; the arrays are in curves/slider_NAME.npz.

    Args:
        text: what a reader sees in it.
        strips: arrays (seeds, methods, frames) that are drawn as curves below, with their titles.
    """

    text: str
    strips: Mapping[str, str]


@dataclass(frozen=True)
class Experiment:
    """All that is known of an experiment.

    Args:
        name: of its command, and in config.json.
        title: its heading on the page.
        about: what it is, in a sentence or two, for the page.
        summary: what it is and how long it takes, for the command's help.
        run: does it, and returns the run's folder. Its arguments are the command's options, and
            its docstring has their help. All take `out`, the folder; `resume`, to go on with the
            run there; `command`, what a user types to do it again; and `progress`, called with a
            title, how much is done and how much there is.
        settings: a dataclass whose fields are options too, where `run` takes them by keyword.
        layouts: of its tables.
        papers: what the papers print, by measure.
        rates: the papers' learning rates, by method.
        theirs: values that some fields of the papers' runs have.
        epochs: the most that the papers train; 0 where there is no such number.
        baseline: the method that others are compared with.
        names: what some values in records are called in tables.
        slider: training frame by frame, where it has that.
        finding: says in a sentence what was found, from a run's records.
        limits: says what the results do not show.
        retitle: gives a title that depends on the configuration.
        mismatch: says why the papers' numbers are of another problem than a configuration's.
        remarks: says what a reader of its tables must know.
        choose: leaves out the records that tables do not show.
    """

    name: str
    title: str = ""
    about: str = ""
    summary: str = ""
    run: Callable[..., Run | None] | None = None
    settings: type | None = None
    layouts: tuple[Layout, ...] = (Layout((RMSE, ACCURACY, TOP1, TOP5)),)
    papers: Mapping[str, PaperTable] = field(default_factory=dict)
    rates: Mapping[str, float] = field(default_factory=lambda: papers.RATES)
    theirs: Mapping[str, Any] = field(default_factory=dict)
    epochs: int = 0
    baseline: str = "sp"
    names: Mapping[Any, str] = field(default_factory=dict)
    slider: Slider | None = None
    finding: Callable[[Run], str] = lambda run: ""
    limits: Callable[[Run], str] = lambda run: ""
    retitle: Callable[[Config], str] = lambda config: ""
    mismatch: Callable[[Config], str] = lambda config: ""
    remarks: Callable[[Config, Iterable[Record]], Iterable[str]] = lambda config, records: ()
    choose: Callable[[Sequence[Record]], Sequence[Record]] = lambda records: records

    def find_printed(self, measure: str, method: str, column: object = "") -> Printed | None:
        """Return what the papers print for a method in a column of a table, or None."""
        table = self.papers.get(measure)
        return table.values.get(str(column), {}).get(method) if table else None

    def source(self, measure: str) -> str:
        """Return where the papers print a measure; empty where they do not."""
        return self.papers[measure].source if measure in self.papers else ""


def options_in_words(tuned: str) -> str:
    """Return tuned options as words.

    Example:
        >>> options_in_words("decay=0.0005:turn=2.4")
        'decay 0.0005, turn 2.4'
    """
    return str(tuned).replace(":", ", ").replace("=", " ").replace("_", " ")


def list_in_words(values: Iterable[Any]) -> str:
    """Return values as a list in a sentence.

    Example:
        >>> list_in_words(["SP", "WN", "BN"])
        'SP, WN and BN'
    """
    *others, last = map(str, values)
    return f"{', '.join(others)} and {last}" if others else last
