"""Tasks that several processes or machines work on together, as an Optuna study.

A trial is one try at a task, and holds the task's name and, at the end, its result. Each process
takes a task that nobody has begun. Where there is none left, it repeats one that is not finished:
whoever began that may have been killed. So no process waits for another, a task may be done twice
at the end, and every process ends with the results of all.
"""

import hashlib
import json
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import optuna

Work = Callable[[str], tuple[float, Any]]


def open_study(
    storage: str, name: str, config: Mapping[str, Any], arrays: Iterable[np.ndarray] = ()
) -> "optuna.Study":
    """Return the study of this experiment, configuration and data; it is made if need be.

    `storage` is the URL of a database, or the path of a file.
    """
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend
    from sqlalchemy.exc import SQLAlchemyError

    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for array in arrays:
        digest.update(np.ascontiguousarray(array).tobytes())
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    is_url = "://" in storage
    try:
        return optuna.create_study(
            storage=storage if is_url else JournalStorage(JournalFileBackend(storage)),
            study_name=f"{name}-{digest.hexdigest()[:12]}",
            load_if_exists=True,
        )
    except (SQLAlchemyError, ImportError, OSError) as error:
        why = str(error).splitlines()[0]
    except (ValueError, LookupError, TypeError):
        why = "it holds something else"
    raise ValueError(
        f"the storage {storage!r} cannot be opened: {why}. It is the path of a file of its own, "
        "or a URL such as postgresql://host/name with an installed driver; of an SQLite file, "
        "sqlite:///search.db."
    )


def share(work: Work, tasks: Sequence[str], study: "optuna.Study") -> dict[str, Any]:
    """Work on tasks with every process that makes this call, and return when all are done.

    Args:
        work: does one task; returns its value, the lower the better, and its result as JSON.
        tasks: their names.
        study: see `open_study`.

    Returns:
        The result of every task, whichever process did it.
    """
    from optuna.trial import TrialState

    while True:
        trials = study.get_trials(deepcopy=False)
        finished = [trial.user_attrs for trial in trials if "result" in trial.user_attrs]
        results = {each["task"]: each["result"] for each in reversed(finished)}  # the first counts
        left = [task for task in tasks if task not in results]
        if not left:
            return {task: results[task] for task in tasks}
        running = [trial for trial in trials if trial.state == TrialState.RUNNING]
        begun = {trial.user_attrs.get("task") for trial in running}
        task = random.choice([task for task in left if task not in begun] or left)
        trial = study.ask()
        trial.set_user_attr("task", task)
        value, result = work(task)
        trial.set_user_attr("result", result)
        study.tell(trial, value if math.isfinite(value) else math.inf)  # NaN would be a failure
