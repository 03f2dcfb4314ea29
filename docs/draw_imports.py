"""Draw which room of the code imports which: docs/images/imports.svg.

Rooms are in the order of docs/architecture.md. An arc on the left goes from a room of the library
to one that it imports; arcs on the right are the laboratory's. All go upwards.
"""

import ast
import re
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import Arc

ROOT = Path(__file__).parents[1]


def read_rooms() -> list[str]:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rooms = re.findall(r"^\| `([\w.]+)` \|", page, flags=re.MULTILINE)
    return [room for room in rooms if room not in ("geoparam", "geoparam.__main__")]


def room_of(module: str, rooms: list[str]) -> str | None:
    return next((room for room in rooms if f"{module}.".startswith(f"{room}.")), None)


def find_imports(rooms: list[str]) -> set[tuple[str, str]]:
    """Return the pairs (room, room it imports)."""
    found = set()
    for path in [*ROOT.glob("geoparam/**/*.py"), *ROOT.glob("geoparam_lab/**/*.py")]:
        own = room_of(".".join(path.relative_to(ROOT).with_suffix("").parts), rooms)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}.{a.name}" for a in node.names]
            for other in (room_of(name, rooms) for name in names):
                if own and other and own != other:
                    found.add((own, other))
    return found


def draw(rooms: list[str], pairs: set[tuple[str, str]]) -> Figure:
    figure = Figure(figsize=(7, 0.24 * len(rooms)))
    axes = figure.add_axes((0, 0, 1, 1))
    place = {room: -i for i, room in enumerate(rooms)}
    for room, y in place.items():
        is_lab = room.startswith("geoparam_lab")
        axes.text(0, y, room, ha="center", va="center", color="C1" if is_lab else "C0")
    longest = max(abs(place[own] - place[other]) for own, other in pairs)
    for own, other in sorted(pairs):
        height = abs(place[own] - place[other])
        is_lab = own.startswith("geoparam_lab")
        middle = (place[own] + place[other]) / 2
        side, angles = (3.6, (270, 90)) if is_lab else (-3.6, (90, 270))
        width = height * 14 / longest  # the widest one ends within the picture
        arc = Arc((side, middle), width, height, theta1=angles[0], theta2=angles[1], lw=0.8)
        arc.set_edgecolor("C1" if is_lab else "C0")
        axes.add_patch(arc)
    axes.set(xlim=(-11, 11), ylim=(-len(rooms), 1))
    axes.axis("off")
    return figure


if __name__ == "__main__":
    matplotlib.rcParams["svg.hashsalt"] = "geoparam"  # the same file from the same imports
    rooms = read_rooms()
    target = ROOT / "docs" / "images" / "imports.svg"
    target.parent.mkdir(exist_ok=True)
    draw(rooms, find_imports(rooms)).savefig(target, metadata={"Date": None})
    print(target.relative_to(ROOT))
