"""What GeometricOptimizer costs over its base on the same plain model, and beside torch's Muon.

    python -m benchmarks.optimizer [--device cuda|cpu] [--steps 20]
        [--batches 2,8,32,128,256] [--modes eager,compiled] [--profile]

First the optimizer's step alone, for a ResNet, a GPT (124 million parameters on a GPU, width 256
on a CPU; q, k and v apart) and 50 small layers, in milliseconds and as a ratio to the base, for
Muon to torch's own Muon with fused AdamW. Then, on a GPU, whole training steps of ResNet-50
(bfloat16 autocast, channels_last, SGD with momentum): both optimizers step the same model,
compiled once, in rounds that take turns; a round is `steps` steps that follow one another as in
training. A cell is the median over rounds. With --profile, in place of all this, where the time of
a step alone goes on a GPU.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torchvision
from torch import nn

import geoparam as gp
from benchmarks.timing import (
    hardware,
    list_kernels,
    make_images,
    make_parser,
    medians,
    print_heading,
    print_row,
    training_step,
)

ROUNDS = 5
Make = Callable[[nn.Module], torch.optim.Optimizer]
SGD = {"base": torch.optim.SGD, "lr": 1e-4, "momentum": 0.9}
ADAM = {"base": torch.optim.Adam, "lr": 1e-5}
MUON = {"base": getattr(torch.optim, "Muon", None), "lr": 1e-5}


def plain(base: Any, **options: Any) -> Make:
    return lambda model: base(model.parameters(), **options)


def geometric(**options: Any) -> Make:
    return lambda model: gp.GeometricOptimizer(model, **options)


class TorchMuon:
    """torch.optim.Muon on hidden matrices and AdamW on every other parameter, as one."""

    def __init__(self, model: nn.Module) -> None:
        layers = [m for m in model.modules() if isinstance(m, nn.Linear)][:-1]
        matrices = [layer.weight for layer in layers]
        hidden = set(map(id, matrices))
        others = [p for p in model.parameters() if id(p) not in hidden]
        self.muon = torch.optim.Muon(matrices, lr=1e-5)
        self.adamw = torch.optim.AdamW(others, lr=1e-5, fused=others[0].is_cuda)

    def step(self) -> None:
        self.muon.step()
        self.adamw.step()


OPTIMIZERS: dict[str, Make] = {
    "SGD": plain(**SGD),
    "geometric SGD": geometric(**SGD),
    "geometric SGD, turn": geometric(turn=0.1, **SGD),
    "geometric SGD, angles": geometric(coordinates="angles", **SGD),
    "Adam": plain(**ADAM),
    "geometric Adam": geometric(**ADAM),
    "geometric Muon, turn": geometric(turn=0.1, **MUON),
}
ON_TEXT: dict[str, Any] = {
    "torch's Muon, AdamW": TorchMuon,
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True),
    "geometric AdamW": geometric(base=torch.optim.AdamW, lr=1e-5),
    "geometric Muon, turn": OPTIMIZERS["geometric Muon, turn"],
}
IN_TRAINING = ("SGD", "geometric SGD", "geometric SGD, turn", "geometric Muon, turn")


def small_layers() -> nn.Module:
    return nn.Sequential(*[nn.Linear(16, 16) for _ in range(50)], nn.Linear(16, 2))


class Block(nn.Module):
    """The matrices of a transformer's block: only their sizes count here."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])


def gpt(width: int, depth: int) -> nn.Module:
    """Return the parameters of a GPT with a tied head."""
    parts = {
        "tokens": nn.Embedding(50304, width),
        "positions": nn.Embedding(1024, width),
        "blocks": nn.ModuleList([Block(width) for _ in range(depth)]),
        "head": nn.Linear(width, 50304, bias=False),
    }
    parts["head"].weight = parts["tokens"].weight
    return nn.ModuleDict(parts)


def step_times(
    model: nn.Module, device: str, steps: int, optimizers: Mapping[str, Any]
) -> dict[str, float]:
    """Return the median seconds of each optimizer's step."""
    for p in model.parameters():
        p.grad = 1e-3 * torch.randn_like(p)
    functions = {name: make(model).step for name, make in optimizers.items()}
    return medians(functions, device, ROUNDS, warmup=1, calls=steps)


def profile(model: nn.Module, optimizers: Mapping[str, Make]) -> None:
    """Print each optimizer's time, how much of it the GPU is busy, and its longest kernels."""
    steps = 20
    times = step_times(model, "cuda", steps, optimizers)
    for name, make in optimizers.items():
        kernels = list_kernels(make(model).step, steps)
        milliseconds = {name: 1e3 * sum(each) / steps for name, each in kernels.items()}
        launches = {name: len(each) / steps for name, each in kernels.items()}
        print(
            f"\n{name}: {times[name] * 1e3:.2f} ms, the GPU is busy for "
            f"{sum(milliseconds.values()):.2f}, {sum(launches.values()):.0f} kernels"
        )
        for kernel in sorted(kernels, key=milliseconds.__getitem__, reverse=True)[:12]:
            print(f"    {milliseconds[kernel]:.3f} ms in {launches[kernel]:g}: {kernel[:150]}")


def _choose_geometric(optimizers: Mapping[str, Make]) -> dict[str, Make]:
    return {name: make for name, make in optimizers.items() if name.startswith("geometric")}


def training_times(batch: int, mode: str, steps: int) -> dict[str, float]:
    """Return the median seconds of ResNet-50's training step under each optimizer."""
    torch.manual_seed(0)
    model = torchvision.models.resnet50().cuda().to(memory_format=torch.channels_last)
    run = model if mode == "eager" else torch.compile(model)
    x, y = make_images(batch, 224, "cuda")
    functions = {}
    for name in IN_TRAINING:
        functions[name] = training_step(run, x, y, optimizer=OPTIMIZERS[name](model))
    return medians(functions, "cuda", ROUNDS, warmup=1, calls=steps)


def print_table(title: str, columns: dict[str, dict[str, float]], peers: dict[str, str]) -> None:
    """Print milliseconds, and in brackets the ratio to the peer; columns are by title."""
    print()
    print_heading(title, *columns)
    for name in next(iter(columns.values())):
        cells = []
        for seconds in columns.values():
            ratio = seconds[name] / seconds[peers[name]]
            cells.append(f"{seconds[name] * 1e3:.2f} ({ratio:.3f})")
        print_row(name, *cells)


def main() -> None:
    options: dict[str, Any] = {"steps": 20, "batches": "2,8,32,128,256"}
    options.update(modes="eager,compiled", profile=False)
    given = make_parser(__doc__, **options).parse_args()
    device, steps = given.device, given.steps
    torch.backends.cudnn.benchmark = True
    print(f"{hardware(device)}; milliseconds per step (ratio to the base on the plain model)")
    resnet = torchvision.models.resnet50 if device == "cuda" else torchvision.models.resnet18
    if given.profile:
        profile(gpt(768, 12).cuda(), _choose_geometric(ON_TEXT))
        profile(resnet().cuda(), _choose_geometric(OPTIMIZERS))
        return
    models = {resnet.__name__: resnet(), "50 layers of 16": small_layers()}
    columns = {
        name: step_times(model.to(device), device, steps, OPTIMIZERS)
        for name, model in models.items()
    }
    peers = {name: "Adam" if "Adam" in name else "SGD" for name in OPTIMIZERS}
    print_table("optimizer's step", columns, peers)

    width, depth = (768, 12) if device == "cuda" else (256, 4)
    times = step_times(gpt(width, depth).to(device), device, steps, ON_TEXT)
    title = f"GPT of width {width}, depth {depth}"
    print_table("optimizer's step", {title: times}, dict.fromkeys(ON_TEXT, "torch's Muon, AdamW"))
    if device == "cuda":
        for mode in given.modes.split(","):
            batches = map(int, given.batches.split(","))
            columns = {str(b): training_times(b, mode, steps) for b in batches}
            print_table(f"ResNet-50, {mode}, batch", columns, peers)


if __name__ == "__main__":
    main()
