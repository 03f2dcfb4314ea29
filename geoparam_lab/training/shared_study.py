"""A grid that several processes or machines work on together, as an Optuna study.

The trials are the points of the grid (GridSampler), in a storage that all of them reach. What a
point gave is kept in its trial, so that every process ends with the results of all. Three things
go wrong in such company:

    two take one point         the earlier trial has it, the later one is given up before its work
    one fails or is stopped    its point goes back into the queue at once
    one is killed              silence for two minutes puts the point back, and who has nothing
                               else to do waits for that. A database has Optuna's heartbeat; in a
                               journal file a running trial counts up an attribute of its own
"""

import contextlib
import hashlib
import itertools
import json
import math
import threading
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
GLANCE = 0.05  # seconds between two looks at a trial that does not have its point yet
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
    study, pulse = _study(storage, name, grid), _Pulse()
    while True:
        done, claimed = _standing(study)
        left = [point for point in points(grid) if _fixed(point) not in done]
        if not left:
            return [(point, done[_fixed(point)]) for point in points(grid)]
        if claimed.issuperset(map(_fixed, left)):
            _wait(study, len(left), waiting, pulse)
        else:
            study.optimize(lambda trial: _objective(study, trial, grid, work, pulse), n_trials=1)


def _objective(
    study: "optuna.Study",
    trial: "optuna.Trial",
    grid: Grid,
    work: Callable[[Point], tuple[float, Any]],
    pulse: "_Pulse",
) -> float:
    import optuna
    from optuna.storages._heartbeat import BaseHeartbeat

    if isinstance(study._storage, BaseHeartbeat):  # its own first beat may come too late
        study._storage.record_heartbeat(trial._trial_id)
    point = {key: trial.suggest_categorical(key, list(values)) for key, values in grid.items()}
    if _is_taken(study, trial.number, point, pulse):
        raise optuna.TrialPruned
    try:
        with _beating(study, trial):
            value, result = work(point)
    except BaseException:
        _queue_again(study, study.trials[trial.number])
        raise
    trial.set_user_attr("result", result)
    return value if math.isfinite(value) else math.inf  # to Optuna, NaN is a failure


def _is_taken(study: "optuna.Study", number: int, point: Point, pulse: "_Pulse") -> bool:
    """Return whether a point is done, or an earlier trial works on it.

    A trial runs before it has its point. Those that came earlier are waited for, so that of two
    that take the same point at the same time one and only one goes on.
    """
    from optuna.trial import TrialState

    while True:
        trials = study.get_trials(deepcopy=False)
        earlier = [t for t in trials if t.number < number and t.state == TrialState.RUNNING]
        done = [t for t in trials if t.state == TrialState.COMPLETE]
        if any(t.params == point for t in earlier + done):
            return True
        if all(len(t.params) == len(point) for t in earlier):
            return False
        time.sleep(GLANCE)
        _give_up(study, pulse)


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


def _wait(study: "optuna.Study", left: int, waiting: Waiting | None, pulse: "_Pulse") -> None:
    """Let some time pass, and put back the points of processes that have fallen silent."""
    if waiting is not None:
        waiting(left)
    time.sleep(PAUSE)
    _give_up(study, pulse)


# --- heartbeats ---------------------------------------------------------------------------------


class _Pulse:
    """Since when each running trial of a journal has been silent, by this process's own clock."""

    def __init__(self) -> None:
        self.heard: dict[int, tuple[Any, float]] = {}  # last beat and when it was new, by number

    def silent(self, trials: "Iterable[optuna.trial.FrozenTrial]") -> Iterator[Any]:
        """Yield the trials that nobody has been heard of for SILENCE seconds."""
        now = time.monotonic()
        for trial in trials:
            beat = trial.user_attrs.get("beat")
            last, since = self.heard.get(trial.number, (None, now))
            self.heard[trial.number] = (beat, since if beat == last else now)
            if now - self.heard[trial.number][1] > SILENCE:
                yield trial


@contextlib.contextmanager
def _beating(study: "optuna.Study", trial: "optuna.Trial") -> Iterator[None]:
    """Say now and then that a trial is worked on, where the storage does not do so itself."""
    from optuna.storages._heartbeat import BaseHeartbeat

    if isinstance(study._storage, BaseHeartbeat):
        yield
        return
    stop = threading.Event()

    def beat() -> None:
        for number in itertools.count():
            with contextlib.suppress(OSError):  # a drive that is away for a moment
                study._storage.set_trial_user_attr(trial._trial_id, "beat", number)
            if stop.wait(HEARTBEAT):
                return

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _give_up(study: "optuna.Study", pulse: _Pulse) -> None:
    """Put back the points of trials whose processes have fallen silent."""
    import optuna
    from optuna.storages._heartbeat import BaseHeartbeat

    if isinstance(study._storage, BaseHeartbeat):
        with _experiments_allowed():
            optuna.storages.fail_stale_trials(study)
        return
    running = study.get_trials(deepcopy=False, states=[optuna.trial.TrialState.RUNNING])
    for trial in pulse.silent(running):
        with contextlib.suppress(optuna.exceptions.UpdateFinishedTrialError):  # another was faster
            study._storage.set_trial_state_values(trial._trial_id, optuna.trial.TrialState.FAIL)
            _queue_again(study, trial)


def check(storage: str) -> None:
    """Raise ValueError where a storage cannot be opened: before a run has a folder."""
    _optuna()
    from sqlalchemy.exc import SQLAlchemyError

    try:
        _storage(storage)
    except (SQLAlchemyError, ModuleNotFoundError) as error:
        raise ValueError(
            f"the storage {storage!r} cannot be opened: {str(error).splitlines()[0]}. It is the "
            "path of a file, or a URL such as sqlite:///search.db, whose driver is installed."
        ) from error


# --- Optuna -------------------------------------------------------------------------------------


def _study(storage: str, name: str, grid: Grid) -> "optuna.Study":
    optuna = _optuna()
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # a point done twice is no news
    sampler = optuna.samplers.GridSampler(grid, seed=0)  # the same order for all
    return optuna.create_study(
        storage=_storage(storage), study_name=name, sampler=sampler, load_if_exists=True
    )


def _optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise ImportError(
            "a shared search needs Optuna: pip install 'geoparam[experiments]'"
        ) from error
    return optuna


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

    if "grid_id" not in trial.system_attrs:  # it did not come so far as to have a point
        return
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
