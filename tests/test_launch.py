"""A kernel's first launch is Triton's; after that only addresses are handed over."""

from types import SimpleNamespace

import pytest
import torch

from geoparam.ops import launch

GRID = (3, 1, 1)


class Kernel:
    """Stand in for a Triton kernel and note its launches."""

    def __init__(self, variant: object) -> None:
        self.variant = variant
        self.launches: list[tuple] = []

    def __getitem__(self, grid: tuple[int, ...]):  # noqa: ANN204
        assert grid == GRID

        def run(*arguments: object, **options: object) -> object:
            self.launches.append((*arguments, options))
            return self.variant

        return run


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """Note the launches past Triton."""
    noted: list[tuple] = []
    runner = lambda variant, grid, device: lambda *arguments: noted.append(arguments)  # noqa: E731
    monkeypatch.setattr(launch, "_runner", runner)
    return noted


def test_later_launches_hand_over_addresses(runs: list[tuple]) -> None:
    kernel = Kernel(SimpleNamespace(packed_metadata=()))
    call = launch.Launch(kernel, GRID, (5, True), 4, maxnreg=128)
    x, y = torch.empty(8), torch.empty(8)
    call(x, y)
    call(y, x)
    assert kernel.launches == [(x, y, 5, True, {"num_warps": 4, "maxnreg": 128})]
    assert runs == [(y.data_ptr(), x.data_ptr(), 5, True)]


def test_addresses_off_sixteen_bytes_are_left_to_triton(runs: list[tuple]) -> None:
    kernel = Kernel(SimpleNamespace(packed_metadata=()))
    call = launch.Launch(kernel, GRID, (), 4)
    x = torch.empty(8)
    for tensor in (x[1:], x, x[1:]):
        call(tensor)
    assert len(kernel.launches) == 3 and not runs
    call(x)
    assert runs == [(x.data_ptr(),)]


def test_what_compiles_nothing_is_called_each_time(runs: list[tuple]) -> None:
    kernel = Kernel(None)  # as Triton's interpreter
    call = launch.Launch(kernel, GRID, (), 4)
    for _ in range(2):
        call(torch.empty(8))
    assert len(kernel.launches) == 2 and not runs
