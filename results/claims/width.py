"""Remark 3.5: is the text's initialisation independent of the width?

The papers' text starts GmP from uniform directions, lam = 0 and r = 1, whatever the layer's size;
their code from Glorot-uniform weights, turned into angles and r = ||w||. Beside these two, SP with
Glorot's and with He's initialisation. (Output layers are Glorot's throughout.) The Levy and Energy
networks before training, for widths 16 ... 16384: how large are hidden activations, outputs and
gradients, and how far does one step of Adam at rate 0.01 move the outputs? (Its first step is
rate x sign of the gradient.) Energy is split by seed; Levy has the papers' 50 points.

**What to expect.** Uniform directions with r = 1 are SP with variance 1 / n, and He's are the same
up to sqrt(2): both know the fan-in n only, and keep activations whatever the width. Glorot's
variance 2 / (n + units) lets them fall as 1 / sqrt(units). Gradients of hidden parameters fall
with the output weights, as 1 / sqrt(units), under all.

`size` is the width; the part "exponents" has for each measure the slope of its logarithm over that
of the width: 0 where it does not depend on it.
"""

import functools

import torch
from claim import Cases, Record, Sets, find_exponents, make_tasks, run
from torch import Tensor, nn

from geoparam_lab import methods
from geoparam_lab.data import splits, uci_data
from geoparam_lab.data.synthetic import levy_regression
from geoparam_lab.training.stacks import stacked

VARIANTS = (  # a method and its initialisation
    "gmp:init=sphere",  # the papers' text, r = 1
    "gmp:init=glorot",  # their code, r = ||w||
    "sp:init=glorot",
    "sp:init=he",
)
WIDTHS = tuple(4**k for k in range(2, 8))  # 16 ... 16384
STEP = 0.01  # rate of the step that is measured
GROUPS = {  # parameters by what they are for; an output layer is number 1 under GmP, 2 under SP
    "direction": ("0.latitude", "0.weight"),
    "offset": ("0.lam", "0.bias"),
    "scale": ("0.r",),
    "output": ("1.weight", "2.weight"),
}
MEASURES = ("activation", "output", *(f"gradient_{group}" for group in GROUPS), "output_change")
EXPONENTS = {f"exponent_{name}": name for name in MEASURES}


def measure_start(model: nn.Sequential, x: Tensor, y: Tensor) -> Record:
    """Return root mean squares of what a new network computes, of its gradients, and of how far
    Adam's first step moves its outputs: every parameter by the rate, against its gradient's sign.
    """
    hidden = model[:-1](x)
    output = model[-1](hidden).squeeze(-1)
    loss = stacked.absolute_error(output[None], y[None])
    parameters = dict(model.named_parameters())
    slopes = torch.autograd.grad(loss, list(parameters.values()))
    by_name = dict(zip(parameters, slopes, strict=True))
    record = {"activation": _rms(hidden), "output": _rms(output)}
    for group, names in GROUPS.items():
        for name in names:
            if name in by_name:
                record[f"gradient_{group}"] = _rms(by_name[name])
    with torch.no_grad():
        for parameter, slope in zip(parameters.values(), slopes, strict=True):
            parameter.sub_(STEP * slope.sign())
    return record | {"output_change": _rms(model(x).squeeze(-1) - output)}


def _rms(values: Tensor) -> float:
    return float(values.detach().square().mean().sqrt())


def measure(cases: Cases, sets: Sets) -> list[Record]:
    records = []
    for _, dataset, variant, width, _, seed in cases:
        if dataset == "levy":
            x, y = levy_regression()[:2]
        else:
            part = splits.stack(*sets[dataset], [seed])
            x, y = part.x_train[0], part.y_train[0]
        model = methods.mlp(variant, (x.shape[-1], int(width), 1), seed=seed)
        records.append(measure_start(model, torch.from_numpy(x), torch.from_numpy(y)))
    return records


if __name__ == "__main__":
    tasks = make_tasks("width", ["levy", "energy"], VARIANTS, WIDTHS, seeds=20)
    conclude = functools.partial(find_exponents, "exponents", EXPONENTS)
    run("width", tasks, measure, conclude, datasets=["energy"], load=uci_data.load)
