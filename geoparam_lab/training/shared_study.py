"""Tasks that several processes or machines work on together, as an Optuna study.

Every task is a queued trial in a database that all processes reach, and Optuna gives each trial to
one process. The result of a task is stored in its trial, so that every process ends with the
results of all. A process that is killed stops sending Optuna's heartbeat; after SILENCE seconds
its trial has failed. The task of a failed trial is queued again by whoever sees it.
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

Work = Callable[[str], tuple[float, Any]]

HEARTBEAT, SILENCE = 30, 120  # seconds between heartbeats; without one a process counts as dead
PAUSE = 1.0  # seconds between two looks at what other processes have finished
_TAKEN = ("WAITING", "RUNNING", "COMPLETE")  # states of a trial whose task is not queued again
OPENINGS = 20  # attempts to open a database whose tables another process is creating


def name_study(name: str, config: Mapping[str, Any], arrays: Iterable[np.ndarray]) -> str:
    """Return a study name that changes with the configuration and the data."""
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for array in arrays:
        digest.update(np.ascontiguousarray(array).tobytes())
    return f"{name}-{digest.hexdigest()[:12]}"


def share(
    work: Work,
    tasks: Sequence[str],
    storage: str,
    name: str,
    waiting: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Work on tasks with every process that makes this call, and return when all are done.

    Args:
        work: does one task; returns its value, the lower the better, and its result as JSON.
        tasks: their names.
        storage: the URL of a database, or the path of an SQLite file.
        name: of the study; it should change with everything that decides the results.
        waiting: called with the number of open tasks while other processes work on all of them.

    Returns:
        The result of every task, whichever process did it.
    """
    study = _open_study(storage, name)
    while True:
        done = [trial.user_attrs for trial in _trials(study, "COMPLETE")]
        results = {each["task"]: each["result"] for each in reversed(done)}  # the first counts
        left = [task for task in tasks if task not in results]
        if not left:
            return {task: results[task] for task in tasks}
        known = {trial.user_attrs.get("task") for trial in _trials(study, *_TAKEN)}
        for task in left:
            if task not in known:
                study.enqueue_trial({}, {"task": task})
        if _trials(study, "WAITING"):
            study.optimize(lambda trial: _compute(study, trial, work), n_trials=1)
            continue
        if waiting is not None:
            waiting(len(left))
        time.sleep(PAUSE)
        with _ignore_experimental() as optuna:
            optuna.storages.fail_stale_trials(study)


def _compute(study: "optuna.Study", trial: "optuna.Trial", work: Work) -> float:
    import optuna

    task = trial.user_attrs.get("task")  # None: another process was faster, the queue is empty
    others = [t for t in _trials(study, "RUNNING", "COMPLETE") if t.number < trial.number]
    if task is None or task in [other.user_attrs.get("task") for other in others]:
        raise optuna.TrialPruned  # two processes may queue a task at once: the first trial has it
    value, result = work(task)
    trial.set_user_attr("result", result)
    return value if math.isfinite(value) else math.inf  # Optuna counts NaN as a failure


def _trials(study: "optuna.Study", *states: str) -> list["optuna.trial.FrozenTrial"]:
    from optuna.trial import TrialState

    return study.get_trials(deepcopy=False, states=[TrialState[state] for state in states])


# --- Optuna -------------------------------------------------------------------------------------


def check_storage(storage: str) -> None:
    """Raise ValueError where a storage cannot be opened: before a run has a folder."""
    import optuna  # noqa: F401 - first, so that an error names the missing extra
    from sqlalchemy.exc import SQLAlchemyError

    try:
        _open_storage(storage)
    except (SQLAlchemyError, ModuleNotFoundError) as error:
        raise ValueError(
            f"the storage {storage!r} cannot be opened: {str(error).splitlines()[0]}. It is the "
            "path of an SQLite file, or a URL such as postgresql://host/name with an installed "
            "driver."
        ) from error


def _open_study(storage: str, name: str) -> "optuna.Study":
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    sampler = optuna.samplers.RandomSampler(seed=0)  # unused: every trial comes from the queue
    return optuna.create_study(
        storage=_open_storage(storage), study_name=name, sampler=sampler, load_if_exists=True
    )


def _open_storage(storage: str) -> Any:
    from sqlalchemy import event
    from sqlalchemy.exc import DatabaseError

    url = storage if "://" in storage else f"sqlite:///{storage}"
    is_sqlite = url.startswith("sqlite")
    options = {"connect_args": {"timeout": 60, "isolation_level": None}} if is_sqlite else {}
    for attempt in itertools.count(1):
        try:
            with _ignore_experimental() as optuna:
                opened = optuna.storages.RDBStorage(
                    url, options, heartbeat_interval=HEARTBEAT, grace_period=SILENCE
                )
            break
        except DatabaseError:  # another process is creating the tables
            if attempt == OPENINGS:
                raise
            time.sleep(0.1)
    if is_sqlite:  # no SELECT FOR UPDATE: without a lock two take one trial
        event.listen(opened.engine, "begin", lambda c: c.exec_driver_sql("BEGIN IMMEDIATE"))
    return opened


@contextlib.contextmanager
def _ignore_experimental() -> Iterator[Any]:
    """Give Optuna without its warning that its heartbeat, of 2021, is experimental."""
    import optuna

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        yield optuna
