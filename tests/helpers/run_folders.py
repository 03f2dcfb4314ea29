"""Run folders as the experiments write them, with invented numbers, to test what reads them."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from geoparam_lab.experiments.uci import EXPERIMENT
from geoparam_lab.run_folder import Record, Run

Array = np.ndarray

METHODS = {"sp": "SP", "wn": "WN", "bn": "BN", "gmp": "GmP"}
SETS = ("boston", "concrete", "energy", "naval", "power", "wine", "yacht")
SPEED = np.array([1.0, 0.7, 0.5, 0.02])  # how much the units of each method wander
LEARNT = np.array([0.6, 0.5, 0.7, 1.0])  # of the target, in the end


def levy(folder: Path, seeds: int = 5, frames: int = 24) -> Run:
    """Each method at the papers' rate, close to the papers' error, with a slider."""
    rmse = {"sp": 1.104, "wn": 1.219, "bn": 1.244, "gmp": 0.496}
    return _toy(folder, "levy", seeds, "test_rmse", rmse, levy_slider(frames))


def banana(folder: Path, seeds: int = 5, frames: int = 24) -> Run:
    """Each method at the papers' rate, close to the papers' accuracy, with a slider."""
    accuracy = {"sp": 0.8, "wn": 0.81, "bn": 0.875, "gmp": 0.885}
    return _toy(folder, "banana", seeds, "test_accuracy", accuracy, banana_slider(frames))


def uci(folder: Path, protocol: str = "paper", splits: int = 10) -> Run:
    """All sets and methods, scattered around the papers' means."""
    config = {"methods": [*METHODS], "datasets": [*SETS], "protocol": protocol, "seeds": splits}
    key = ("dataset", "method", "split", "lr", "chosen")
    run = Run.create(folder, "uci", config, f"geoparam run uci --out {folder}", key=key)
    for record in uci_records(protocol, splits):
        run.append(record)
    return run


def uci_records(protocol: str = "paper", splits: int = 10) -> list[Record]:
    """Results that share the luck of their split; under "heldout" with the search for a rate."""
    rng = np.random.default_rng(1)
    found: list[Record] = []
    for dataset in SETS:
        luck = rng.standard_normal(splits)
        for method in METHODS:
            printed = EXPERIMENT.find_printed("test_rmse", method, dataset)
            assert printed is not None
            spread = 2 * ((printed.error or 0.0) + 1e-4)
            values = printed.value + spread * (luck + 0.3 * rng.standard_normal(splits))
            for split, value in enumerate(values.tolist()):
                found += _uci(dataset, method, split, protocol, value)
    return found


def _uci(dataset: str, method: str, split: int, protocol: str, value: float) -> list[Record]:
    shared = {"method": method, "dataset": dataset, "split": split, "protocol": protocol}
    rate = 0.1 if method == "gmp" or (protocol == "heldout" and split % 3) else 0.01
    result = {**shared, "lr": rate, "chosen": True, "test_rmse": value, "outcome": "finished"}
    if protocol == "paper":
        return [result]
    trials = [{**shared, "lr": lr, "chosen": False, "val_rmse": value} for lr in (0.01, 0.1)]
    return [*trials, {**result, "val_rmse": value}]


def _toy(
    folder: Path, experiment: str, seeds: int, measure: str, centre: dict[str, float], slider: Any
) -> Run:
    config = {"methods": [*METHODS], "seeds": seeds, "rates": [0.01, 0.1]}
    command = f"geoparam run {experiment} --seeds {seeds} --out {folder}"
    run = Run.create(folder, experiment, config, command, key=("method", "lr", "seed"))
    rng = np.random.default_rng(0)
    for method in METHODS:
        calm = method == "gmp"
        for seed in range(seeds):
            record: dict[str, Any] = {"method": method, "seed": seed, "lr": 0.1 if calm else 0.01}
            record |= {"init": "glorot", "epochs": 3000 + seed, "best_epoch": 2000 + seed}
            record |= {"outcome": "finished", "largest_move": 0.3 if calm else 65000.0}
            record |= {"largest_rotation": 9.0 if calm else 179.0}
            run.append(record | {measure: centre[method] + 0.02 * rng.standard_normal()})
    run.save_curves(f"slider_{experiment}", **add_seeds(slider))
    return run


def add_seeds(arrays: dict[str, Array], seeds: tuple[int, ...] = (0, 3)) -> dict[str, Array]:
    """Give a slider several seeds: the methods' films in another order under the second one."""
    shared = ("kind", "methods", "steps", "grid", "truth", "x", "y", "limits")
    several = {
        name: np.stack([np.roll(array, i, axis=0) for i in range(len(seeds))])
        for name, array in arrays.items()
        if name not in shared
    }
    return {**arrays, **several, "seeds": np.array(seeds)}


def levy_slider(frames: int, units: int = 40) -> dict[str, Array]:
    """A fit that closes in on its target, with units that wander, some far away and one lost."""
    rng = np.random.default_rng(2)
    grid = np.linspace(-10, 10, 101)
    truth = np.sin(grid) ** 2 + 0.1 * grid**2
    share = np.linspace(0, 1, frames)[:, None] * LEARNT[:, None, None]
    start = rng.uniform(-9, 9, (4, 1, units))
    locations = start + 15 * _walk(rng, frames, units)
    locations[0, -1, 0] = np.inf
    x = rng.uniform(-10, 10, 50)
    return {
        "kind": np.array("levy"),
        "methods": np.array([*METHODS.values()]),
        "steps": epochs(frames),
        "grid": grid,
        "truth": truth,
        "x": x,
        "y": np.interp(x, grid, truth) + 0.1 * rng.standard_normal(50),
        "prediction": share * truth,
        "locations": locations,
        "loss": 3 * (1.02 - share[..., 0]),
        "moves": np.abs(np.diff(locations, axis=1, prepend=start)).max(axis=2),
    }


def banana_slider(frames: int, units: int = 10, side: int = 60) -> dict[str, Array]:
    """Two bands of points, a boundary that bends towards them, and units that turn."""
    rng = np.random.default_rng(3)
    y = np.arange(400) % 2
    first = rng.uniform(-2, 2, 400)
    second = np.cos(1.5 * first) - y + 0.3 + 0.25 * rng.standard_normal(400)
    across = np.linspace(-2.5, 2.5, side)
    bend = np.linspace(0, 1, frames) * LEARNT[:, None]
    height = bend[..., None, None] * np.cos(1.5 * across) - 0.2
    angle = rng.uniform(0, 6.3, (4, 1, units)) + 0.4 * _walk(rng, frames, units)
    return {
        "kind": np.array("banana"),
        "methods": np.array([*METHODS.values()]),
        "steps": epochs(frames),
        "x": np.stack([first, second], axis=1),
        "y": y,
        "limits": np.array([-2.5, 2.5, -2.5, 2.5]),
        "score": (255 / (1 + np.exp(6 * (across[:, None] - height)))).round().astype(np.uint8),
        "direction": np.stack([np.cos(angle), np.sin(angle)], axis=-1),
        "distance": rng.uniform(0, 0.5, (4, 1, units)) + 0.4 * _walk(rng, frames, units),
        "accuracy": 0.5 + 0.4 * bend,
        "rotation": np.degrees(np.abs(np.diff(angle, axis=1, prepend=angle[:, :1]))).max(axis=2),
    }


def epochs(frames: int) -> Array:
    """The epochs of so many frames, denser at the start."""
    return np.append(0, np.geomspace(1, 1000, frames - 1).cumsum().round())


def _walk(rng: np.random.Generator, frames: int, units: int) -> Array:
    steps = rng.standard_normal((4, frames, units))
    return SPEED[:, None, None] * steps.cumsum(axis=1)


def lines(run: Run) -> list[Record]:
    """The records in a run's file, each line of it, sorted by what they are of."""
    text = (run.folder / "metrics.jsonl").read_text().splitlines()
    return sorted(map(json.loads, text), key=lambda r: (r["method"], r["lr"], r["seed"]))


def curves_of(run: Run, record: Record) -> dict[str, Array]:
    """The arrays of a network of Levy or Banana."""
    return run.curves(f"{record['method']}-lr{record['lr']:g}-seed{record['seed']}")


def demo(base: Path) -> list[Path]:
    """Runs of all kinds, one with a figure."""
    levy(base / "levy")
    banana(base / "banana")
    uci(base / "uci")
    uci(base / "fair", "heldout")
    picture(base / "levy" / "figures", "figure2c", caption="Figure 2c. How far units move.")
    return [base / name for name in ("levy", "banana", "uci", "fair")]


def picture(folder: Path, name: str, caption: str = "") -> None:
    """A white picture, 1500 pixels wide."""
    from PIL import Image

    folder.mkdir(exist_ok=True)
    Image.new("L", (1500, 300), 255).save(folder / f"{name}.png")
    if caption:
        (folder / f"{name}.txt").write_text(caption)
