"""Levy regression in one dimension: one hidden layer of 100 units, standard (SP) against GmP.

The protocol is the papers', with the details that only their code gives. Everything is float64,
the loss is the mean absolute error over all points at once, and the optimizer is Adam as Keras
writes it. The rate falls to a tenth after 500 epochs without a better training loss (the
patience), training stops after 1,000, and the weights with the best loss are the result.
(Keras keeps the weights one step *after* the best loss; we keep those that gave it.)

With one input a unit has no angle: its direction is a fixed sign, its boundary a single point,
and GmP learns where that point lies (lam) and how much the unit weighs (r).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import l1_loss

import geoparam as gp
from geoparam.data.synthetic import Regression, levy_regression

if TYPE_CHECKING:
    from matplotlib.figure import Figure

UNITS = 100
EPOCHS = 10_000
PATIENCE = 500
LEARNING_RATES = {"sp": 0.01, "gmp": 0.1}  # cross-validated by the papers
REFERENCE_RMSE = {"sp": 1.104, "gmp": 0.496}  # the papers', one seed
TITLES = {"sp": "SP", "gmp": "GmP"}

Progress = Callable[[int, float], None]


@dataclass(frozen=True)
class Outcome:
    """What one training run leaves behind, as arrays.

    Arguments:
        losses: training loss before each update, (epochs,).
        locations: each unit's characteristic point before each update, (epochs, units).
        best_epoch: the epoch whose weights were kept.
        prediction: the kept weights' output on the test grid, (grid,).
        test_rmse: its root mean squared error there.
    """

    losses: np.ndarray
    locations: np.ndarray
    best_epoch: int
    prediction: np.ndarray
    test_rmse: float

    @property
    def units(self) -> np.ndarray:
        """The characteristic points of the kept weights, (units,)."""
        return self.locations[self.best_epoch]

    @property
    def largest_moves(self) -> np.ndarray:
        """Largest move of any characteristic point in each update, (epochs - 1,)."""
        return np.abs(np.diff(self.locations, axis=0)).max(axis=1)


def run(
    method: str,
    seed: int = 0,
    epochs: int = EPOCHS,
    patience: int = PATIENCE,
    progress: Progress | None = None,
) -> Outcome:
    """Train ``method`` ("sp" or "gmp") on the papers' data, from initial weights of this seed.

    Example:
        >>> outcome = run("gmp", epochs=3)
        >>> outcome.losses.shape, outcome.locations.shape, outcome.prediction.shape
        ((3,), (3, 100), (201,))
    """
    model = build(method, seed)
    return train(model, levy_regression(), LEARNING_RATES[method], epochs, patience, progress)


def build(method: str, seed: int = 0) -> nn.Sequential:
    """Hidden layer, ReLU, output layer, with the initialisation of the papers' code.

    Example:
        >>> build("sp")[-1]
        Linear(in_features=100, out_features=1, bias=True)
    """
    if method not in LEARNING_RATES:
        raise ValueError(f"method must be one of {', '.join(LEARNING_RATES)}; got {method!r}")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # leaves the other devices alone
        output = _glorot_linear(UNITS, 1)
        if method == "sp":
            return nn.Sequential(_glorot_linear(1, UNITS), nn.ReLU(), output)
        hidden = gp.GmPLinear(1, UNITS, activation=torch.relu, init="glorot", dtype=torch.float64)
        return nn.Sequential(hidden, output)


def _glorot_linear(fan_in: int, fan_out: int) -> nn.Linear:
    layer = nn.Linear(fan_in, fan_out, dtype=torch.float64)
    nn.init.xavier_uniform_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def train(
    model: nn.Sequential,
    data: Regression,
    lr: float,
    epochs: int = EPOCHS,
    patience: int = PATIENCE,
    progress: Progress | None = None,
) -> Outcome:
    """Train in place by the protocol above; the model ends with its best weights.

    Training stops after twice the patience; ``progress(epoch, loss)`` is called once an epoch.
    """
    x, y = torch.from_numpy(data.x_train), torch.from_numpy(data.y_train)
    optimizer = keras_adam(model, lr)
    plateau = keras_plateau(optimizer, patience)
    losses: list[float] = []
    locations: list[Tensor] = []
    best_epoch, best_state = 0, _snapshot(model)
    while len(losses) < epochs and len(losses) <= best_epoch + 2 * patience:
        loss = l1_loss(model(x).squeeze(-1), y)
        losses.append(loss.item())
        locations.append(characteristic_points(model[0]))
        if losses[-1] < losses[best_epoch]:
            best_epoch, best_state = len(losses) - 1, _snapshot(model)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        plateau.step(losses[-1])
        if progress is not None:
            progress(len(losses), losses[-1])
    model.load_state_dict(best_state)
    prediction = predict(model, data.x_test)
    test_rmse = float(np.sqrt(np.mean((prediction - data.y_test) ** 2)))
    points = torch.stack(locations).numpy()
    return Outcome(np.array(losses), points, best_epoch, prediction, test_rmse)


def _snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@torch.no_grad()
def predict(model: nn.Module, x: np.ndarray) -> np.ndarray:
    """The model's output on an array, as an array (points,)."""
    return model(torch.from_numpy(x)).squeeze(-1).numpy()


@torch.no_grad()
def characteristic_points(hidden: nn.Module) -> Tensor:
    """Where each unit of a layer with one input switches, -b / w, (units,).

    Example:
        >>> layer = nn.Linear(1, 1)
        >>> _ = nn.init.constant_(layer.weight, 2.0), nn.init.constant_(layer.bias, -1.0)
        >>> characteristic_points(layer)
        tensor([0.5000])
    """
    weight, bias = cast(Tensor, hidden.weight), cast(Tensor, hidden.bias)
    return -bias / weight.squeeze(-1)


def keras_adam(model: nn.Module, lr: float, epsilon: float = 1e-7) -> torch.optim.Adam:
    """Adam as Keras writes it: epsilon joins the root of v before the bias correction.

    torch adds its own after, so at step t torch's must be epsilon / sqrt(1 - beta2 ** t).
    """
    optimizer = torch.optim.Adam(model.parameters(), lr=lr, eps=epsilon)
    step = 0

    def scale_epsilon(*_: object) -> None:
        nonlocal step
        step += 1
        for group in optimizer.param_groups:
            group["eps"] = epsilon / math.sqrt(1 - group["betas"][1] ** step)

    optimizer.register_step_pre_hook(scale_epsilon)
    return optimizer


def keras_plateau(
    optimizer: torch.optim.Optimizer, patience: int
) -> torch.optim.lr_scheduler.ReduceLROnPlateau:
    """Rate x 0.1 once ``patience`` epochs brought no loss lower by 1e-4, as Keras counts them.

    Keras acts when the count reaches the patience, torch when it exceeds it: hence one less.
    """
    return torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, factor=0.1, patience=patience - 1, threshold=1e-4, threshold_mode="abs", eps=0
    )


def draw(data: Regression, outcomes: dict[str, Outcome]) -> "Figure":
    """One figure: each method's fit above, training loss and motion of the units below."""
    from geoparam import plots  # matplotlib is an extra; training does without it

    figure, axes = plots.new_figure(2, len(outcomes), size=(5.5 * len(outcomes), 7.5))
    grid = data.x_test.squeeze(-1)
    for ax, (method, outcome) in zip(axes[0], outcomes.items(), strict=True):
        plots.fit_1d(
            ax,
            points=(data.x_train.squeeze(-1), data.y_train),
            grid=grid,
            truth=data.y_test,
            prediction=outcome.prediction,
            units=outcome.units,
            colour=plots.COLOURS[TITLES[method]],
        )
        ax.sharey(axes[0, 0])
        ax.set_title(f"{TITLES[method]}: test RMSE {outcome.test_rmse:.3f}", loc="left")
    axes[0, 0].legend(frameon=False)
    losses = {TITLES[method]: outcome.losses for method, outcome in outcomes.items()}
    moves = {TITLES[method]: outcome.largest_moves for method, outcome in outcomes.items()}
    plots.training_curves(axes[1, 0], losses, title="Training loss (mean absolute error)")
    plots.training_curves(axes[1, 1], moves, title="Largest move of a unit in one update")
    return figure
