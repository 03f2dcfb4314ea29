"""What conversion costs: evaluation before and after folding, and the conversion itself.

    python -m benchmarks.conversion [--device cpu|cuda] [--repeats 30]

Evaluation times are ratios to the plain model in the same run (ResNet-50, no_grad, eager).
Conversion is timed on the CPU, and its peak memory compared with the model's, in processes of
their own: ResNet-50, and a CLIP of the size of ViT-L/14 with random weights where transformers is
installed.
"""

import copy
import multiprocessing
import time
from collections.abc import Callable

import torch
from torch import nn

import geoparam as gp
from benchmarks.timing import hardware, make_parser, medians, print_heading, print_row


def evaluation(device: str, repeats: int) -> None:
    """Print how long ResNet-50 takes in each form, over the plain one."""
    from torchvision.models import resnet50

    batch, size = (64, 224) if device == "cuda" else (4, 128)
    x = torch.randn(batch, 3, size, size, device=device)
    plain = resnet50().to(device).eval()
    models = {"plain": plain}
    for name, options in {
        "angles": {},
        "intrinsic": {"coordinates": "intrinsic"},
        "angles, IMN": {"norm": "imn", "pretrained": True, "example_inputs": x[:2]},
    }.items():
        converted = gp.convert_(copy.deepcopy(plain), **options)
        models[f"{name}, converted"] = converted
        models[f"{name}, folded"] = gp.fold_(copy.deepcopy(converted))

    def run(model: nn.Module) -> Callable[[], object]:
        return torch.no_grad()(lambda: model(x))

    times = medians({name: run(model) for name, model in models.items()}, device, repeats)
    print(f"ResNet-50, evaluation of {batch} x {size}^2, eager, float32\n")
    print_heading("model", "time / plain")
    for name, seconds in times.items():
        print_row(name, f"{seconds / times['plain']:.3f}")


def resnet() -> nn.Module:
    from torchvision.models import resnet50

    return resnet50()


def clip_large() -> nn.Module:
    from transformers import CLIPConfig, CLIPModel

    text = {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12}
    vision = {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "patch_size": 14,
    }
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=768))


def convert_once(build: Callable[[], nn.Module], queue: multiprocessing.Queue) -> None:
    """Convert in a process of its own, and report seconds and memory."""
    torch.set_num_threads(2)
    model = build()
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    gp.convert_(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 2)))  # what is loaded on first use
    before = _reset_peak()
    start = time.perf_counter()
    gp.convert_(model)
    seconds = time.perf_counter() - start
    queue.put((size, seconds, (_peak() - before + size) / size))


def _reset_peak() -> int:
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # forget the peak so far (Linux)
    return _peak()


def _peak() -> int:
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def conversion() -> None:
    """Print how long conversion takes, and the peak of memory over the model's size."""
    print()
    print_heading("conversion, two CPU cores", "parameters, MB", "seconds", "peak memory / model")
    context = multiprocessing.get_context("spawn")
    for build in (resnet, clip_large):
        queue = context.Queue()
        process = context.Process(target=convert_once, args=(build, queue))
        process.start()
        process.join()
        if process.exitcode == 0:
            size, seconds, peak = queue.get()
            print_row(build.__name__, f"{size / 1e6:.0f}", f"{seconds:.1f}", f"{peak:.2f}")


def main() -> None:
    given = make_parser(__doc__, repeats=30).parse_args()
    print(f"{hardware(given.device)}\n")
    evaluation(given.device, given.repeats)
    conversion()


if __name__ == "__main__":
    main()
