"""The Optuna study through which several processes or machines share the tasks of a run."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import optuna


def open_study(storage: str, name: str, config: Mapping[str, Any]) -> "optuna.Study":
    """Return the study of this experiment and configuration; it is made if need be.

    `storage` is the URL of a database, or the path of a file.
    """
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend
    from sqlalchemy.exc import SQLAlchemyError

    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    is_url = "://" in storage
    try:
        if not is_url and Path(storage).exists():  # Optuna would write to it before it reads
            first = Path(storage).read_bytes().partition(b"\n")[0]
            if first and "op_code" not in json.loads(first):
                raise ValueError
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
