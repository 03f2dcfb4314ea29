"""Small runs on text in memory."""

from typing import Any

import numpy as np

from geoparam_lab.checks import find_defaults
from geoparam_lab.data.texts import Text
from geoparam_lab.training.text.settings import TextSettings, list_tasks

AXES = ("turns", "lrs", "momenta", "decays", "rest_lrs", "rest_decays", "scale_lrs")
SMALL = {"context": 16, "windows": 8, "marks": 3, "precision": "fp32"}


def text() -> Text:
    """Return a text of few words, so that there is something to learn."""
    words = np.random.default_rng(0).choice(["ab", "abc", "ba ", "cab ", "\n"], size=3000)
    content = np.frombuffer("".join(words).encode(), np.uint8)
    return Text(content[:-600], content[-600:], "words")


def make_settings(method: str = "turn", **changes: Any) -> TextSettings:
    """Return the settings of nine steps of a network with one block."""
    sizes: dict[str, Any] = {"widths": [16], "depths": [1], "steps": [9], "batch_sizes": [4]}
    config = {**find_defaults(TextSettings), **dict.fromkeys(AXES), **sizes, **SMALL}
    config |= {"methods": [method], "schedules": ["linear"], "seeds": 1, "one_factor": False}
    [task] = list_tasks({**config, "rest_lrs": [0.01], **changes})
    settings: TextSettings = task.settings
    return settings
