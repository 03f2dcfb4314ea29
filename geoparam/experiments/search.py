"""A grid that several processes or machines work on together, as an Optuna study.

The trials are the points of the grid (GridSampler), in a storage that all of them reach. What a
point gave is kept in its trial, so that every process ends with the results of all. Three things
go wrong in such company:

    two take one point         GridSampler hands the first trials out by number, so that this is
                               rare; the result of the first to finish counts
    one fails or is stopped    its point goes back into the queue at once
    one is killed              a database has a heartbeat: silence for two minutes puts the point
                               back, and who has nothing else to do waits for that. A journal file
                               has none: who has nothing else to do takes the point once more
"""

import contextlib
import hashlib
import itertools
import json
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import optuna

Point = dict[str, Any]
Grid = Mapping[str, Sequence[Any]]
Waiting = Callable[[int], None]

HEARTBEAT, SILENCE = (
    30,
    120,
)  # seconds: between two beats, and after which a process counts as gone
PAUSE = 1.0  # seconds between two looks at what others do
OPENINGS = 20  # attempts to open a database that another process is just making


def points(grid: Grid) -> list[Point]:
    """Return all combinations of a grid's values.

    Example:
        >>> points({"method": ["sp", "gmp"], "lr": [0.1]})
        [{'method': 'sp', 'lr': 0.1}, {'method': 'gmp', 'lr': 0.1}]
    """
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def study_name(name: str, config: Mapping[str, Any], arrays: Iterable[np.ndarray]) -> str:
    """Return a name for a study that tells apart all that decides its results.

    Example:
        >>> study_name("uci-yacht", {"epochs": 5}, [np.zeros(3)])
        'uci-yacht-f53de0ff240c'
    """
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for array in arrays:
        digest.update(np.ascontiguousarray(array).tobytes())
    return f"{name}-{digest.hexdigest()[:12]}"


def share(
    work: Callable[[Point], tuple[float, Any]],
    grid: Grid,
    storage: str,
    name: str,
    waiting: Waiting | None = None,
) -> list[tuple[Point, Any]]:
    """Work on a grid with all who call this with the same arguments, until it is done.

    Args:
        work: does a point; returns its value, the lower the better, and its result, as JSON.
        grid: the values of each parameter.
        storage: the URL of a database, such as sqlite:///search.db, or else the path of a journal
            file, which may be on a network drive.
        name: of the study; it should tell all apart that decides the results.
        waiting: called with how many points are left while others work on all of these.

    Returns:
        Every point with its result, whoever did it.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     share(lambda point: (0.0, -point["x"]), {"x": [1, 2]}, f"{folder}/log", "signs")
        [({'x': 1}, -1), ({'x': 2}, -2)]
    """
    study = _study(storage, name, grid)
    while True:
        done, claimed = _standing(study)
        left = [point for point in points(grid) if _fixed(point) not in done]
        if not left:
            return [(point, done[_fixed(point)]) for point in points(grid)]
        if claimed.issuperset(map(_fixed, left)) and _is_database(storage):
            _wait(study, len(left), waiting)
        else:
            study.optimize(lambda trial: _objective(study, trial, grid, work), n_trials=1)


def _objective(
    study: "optuna.Study",
    trial: "optuna.Trial",
    grid: Grid,
    work: Callable[[Point], tuple[float, Any]],
) -> float:
    from optuna.storages._heartbeat import BaseHeartbeat

    if isinstance(study._storage, BaseHeartbeat):  # its own first beat may come too late
        study._storage.record_heartbeat(trial._trial_id)
    point = {key: trial.suggest_categorical(key, list(values)) for key, values in grid.items()}
    try:
        value, result = work(point)
    except BaseException:
        _queue_again(study, study.trials[trial.number])
        raise
    trial.set_user_attr("result", result)
    return value if math.isfinite(value) else math.inf  # to Optuna, NaN is a failure


def _standing(study: "optuna.Study") -> tuple[dict[Any, Any], set[Any]]:
    """Return the results of the points that are done, and the points that someone works on."""
    from optuna.trial import TrialState

    trials = study.get_trials(deepcopy=False)
    done: dict[Any, Any] = {}
    for trial in trials:
        if trial.state == TrialState.COMPLETE:
            done.setdefault(_fixed(trial.params), trial.user_attrs["result"])
    return done, {_fixed(t.params) for t in trials if t.state == TrialState.RUNNING}


def _fixed(point: Point) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(point.items()))


def _wait(study: "optuna.Study", left: int, waiting: Waiting | None) -> None:
    """Let some time pass, and put back the points of processes that have fallen silent."""
    import optuna

    if waiting is not None:
        waiting(left)
    time.sleep(PAUSE)
    with _experiments_allowed():
        optuna.storages.fail_stale_trials(study)


# --- Optuna -------------------------------------------------------------------------------------


def _study(storage: str, name: str, grid: Grid) -> "optuna.Study":
    try:
        import optuna
    except ImportError as error:
        raise ImportError(
            "a shared search needs Optuna: pip install 'geoparam[experiments]'"
        ) from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # a point done twice is no news
    sampler = optuna.samplers.GridSampler(grid, seed=0)  # the same order for all
    return optuna.create_study(
        storage=_storage(storage), study_name=name, sampler=sampler, load_if_exists=True
    )


def _storage(storage: str) -> Any:
    import optuna
    from sqlalchemy.exc import DatabaseError

    if not _is_database(storage):
        from optuna.storages.journal import JournalFileBackend

        return optuna.storages.JournalStorage(JournalFileBackend(storage))
    patience = {"connect_args": {"timeout": 60}} if storage.startswith("sqlite") else {}
    for attempt in itertools.count(1):
        try:
            with _experiments_allowed():
                return optuna.storages.RDBStorage(
                    storage,
                    engine_kwargs=patience,
                    heartbeat_interval=HEARTBEAT,
                    grace_period=SILENCE,
                    heartbeat_stale_trial_callback=_queue_again,
                )
        except DatabaseError:  # another process is making the tables
            if attempt == OPENINGS:
                raise
            time.sleep(0.1)


def _is_database(storage: str) -> bool:
    return "://" in storage


def _queue_again(study: "optuna.Study", trial: "optuna.trial.FrozenTrial") -> None:
    """Queue the point of a trial that will not be finished.

    It is queued by its number in the grid alone. With its parameters, it would count as someone's
    work from the moment it is taken, before there is a heartbeat to tell whether they live.
    """
    import optuna

    number = {name: trial.system_attrs[name] for name in ("grid_id", "search_space")}
    state = optuna.trial.TrialState.WAITING
    study.add_trial(optuna.create_trial(state=state, system_attrs=number))


@contextlib.contextmanager
def _experiments_allowed() -> Iterator[None]:
    """Optuna has called its heartbeat experimental since 2021, and warns of it."""
    import optuna

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        yield
