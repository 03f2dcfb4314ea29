"""What the width and the claims share: tasks whose members are the keys of their records, and
figures of means over these."""

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from geoparam_lab import methods
from geoparam_lab.run_folder import Record, Run, group_records
from geoparam_lab.training.tasks import Done, Progress, Session, Tick, count_cores

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Meter = Callable[[Sequence[Any], Tick], Iterable[Record]]  # measures some members


class Task(NamedTuple):
    """Networks or layers that are measured together; each is the key of its record."""

    title: str
    keys: tuple[Any, ...]

    def __str__(self) -> str:
        return self.title


def measure_missing(
    run: Run, tasks: Sequence[Task], measure: Meter, jobs: int | None, progress: Progress | None
) -> None:
    """Do the tasks that are not done; `measure` gives the results of each of a task's keys."""
    total = sum(len(task.keys) for task in tasks)
    work = functools.partial(_work, measure)
    Session(run, work, total, jobs or count_cores(), progress).spread(tasks)


def _work(measure: Meter, task: Task, tick: Tick) -> Done:
    found = zip(task.keys, measure(task.keys, tick), strict=True)
    return Done([key._asdict() | own for key, own in found])


def select_records(records: Iterable[Record], **fields: Any) -> list[Record]:
    """Return the records that have these values."""
    return [r for r in records if all(r[name] == value for name, value in fields.items())]


# --- figures ------------------------------------------------------------------------------------


class Panels(NamedTuple):
    """A figure of means over records, in which fields make rows, columns and lines."""

    caption: str
    rows: str  # a field, each of whose values has a row
    over: str  # the field along the horizontal axis, and what that is called
    label: str
    measures: Mapping[str, str]  # a column each, with its label
    columns: tuple[str, ...] = ()  # fields that divide these further
    lines: tuple[str, ...] = ("method",)
    scales: tuple[str, str] = ("log", "linear")
    names: Mapping[Any, str] = {}  # of the values of columns and lines, where they have others


def draw_panels(records: Sequence[Record], panels: Panels) -> "Figure":
    """Draw a measure's mean; where records have its value at the start too, that in pale."""
    from geoparam import plots

    rows, (xscale, yscale) = group_records(records, panels.rows), panels.scales
    columns = list(itertools.product(panels.measures, group_records(records, *panels.columns)))
    size = (3.4 * len(columns) + 1.5, 3 * len(rows))
    figure, axes = plots.new_figure(len(rows), len(columns), size=size)
    for row, ((value,), own) in zip(axes, rows.items(), strict=True):
        for ax, (measure, column) in zip(row, columns, strict=True):
            fields = dict(zip(panels.columns, column, strict=True))
            known = [r for r in select_records(own, **fields) if measure in r]
            if known and f"{measure}_start" in known[0]:
                pale = {"alpha": 0.4, "marker": "", "label": None}
                _draw_lines(ax, known, panels, f"{measure}_start", **pale)
            _draw_lines(ax, known, panels, measure)
            if len(panels.measures) == 1 and ax is not row[0]:
                ax.sharey(row[0])
            said = f"rate {value:g}" if panels.rows == "lr" else value.capitalize()
            title = ": ".join(filter(None, (said, panels.names.get(column, ""))))
            ax.set(xscale=xscale, yscale=yscale, xlabel=panels.label)
            ax.tick_params(axis="x", which="minor", labelbottom=False)  # they would overlap
            ax.set(ylabel=panels.measures[measure], title=title)
            if measure == "smallest":  # the products, down to 1e-30
                ax.set_yscale("symlog", linthresh=1e-6)
                ax.set_ylim(0, 1)
    plots.legend_beside(axes[0, -1])
    return figure


def _draw_lines(
    ax: "Axes", records: Sequence[Record], panels: Panels, measure: str, **style: Any
) -> None:
    """Draw the means of a measure over a field, or of a path over epochs."""
    from geoparam import plots

    found = dict(sorted(group_records(records, *panels.lines).items(), key=_first_number))
    lines = [each.line for each in plots.curve_styles(methods.title(str(at[0])) for at in found)]
    if panels.lines != ("method",):
        lines = [{"color": colour} for colour in plots.ordered_colours(len(found))]
    for (at, own), line in zip(found.items(), lines, strict=True):
        if panels.over == "epochs":
            x, means = own[0]["epochs"], np.mean([r[measure] for r in own], axis=0)
        else:
            by_x = group_records(sorted(own, key=lambda r: r[panels.over]), panels.over)
            x = [value for (value,) in by_x]
            means = [np.mean([r[measure] for r in some]) for some in by_x.values()]
        name = f"{panels.lines[0]} {at[0]:,}" if isinstance(at[0], int) else at[0]
        label = panels.names.get(at) or methods.title(str(name))
        ax.plot(x, means, **{**line, "label": label, "marker": "o", "ms": 3, **style})


def _first_number(entry: tuple[tuple[Any, ...], Any]) -> float:
    """Return what lines are ordered by: their number, where they have one."""
    value = entry[0][0]
    return value if isinstance(value, int | float) else 0
