"""Draw docs/architecture.svg from the table of rooms in docs/architecture.md, which tests hold against the imports.

python docs/draw_map.py
"""

from __future__ import annotations

import functools
import re
import textwrap
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path

PAGE, PICTURE = (Path(__file__).with_name(f"architecture.{ending}") for ending in ("md", "svg"))
GROUND = (("config",), ("garbage", "small_files", "whole_files"), ("reader",))  # what all others may import
NAMED = {"launch": ("students",)}  # by strings in a table
WIDTH, GAP, LINE, PADDING, LETTER = 960, 12, 14, 8, 6.2  # pixels; LETTER: the mean width of one


def rooms(page: str) -> dict[str, tuple[str, list[str]]]:
    """Return what each room has, and which rooms it imports."""
    rows = page.split("| room | what it has | imports from |", 1)[1].split("\n\n")[0].splitlines()[2:]
    found = {}
    for row in rows:
        names, has, below = row.strip("| ").split(" | ")
        for name in re.findall(r"`([^`]+)`", names):
            found[name] = has.partition("; ")[0].replace("`", ""), re.findall(r"`([^`]+)`", below)
    return found


def floors(imports: Mapping[str, list[str]]) -> list[list[str]]:
    """Return the rooms from the top down; a room stands below all that import it, and GROUND below all others."""
    above: dict[str, list[str]] = {name: [] for name in imports}
    for name, below in imports.items():
        for other in (*below, *NAMED.get(name, ())):
            if other in above:
                above[other].append(name)

    @functools.cache
    def depth(name: str) -> int:
        return max((1 + depth(other) for other in above[name]), default=0)

    house = [name for name in imports if not any(name in floor for floor in GROUND)]
    deepest = max(map(depth, house))
    return [[name for name in house if depth(name) == floor] for floor in range(deepest + 1)] + [*map(list, GROUND)]


def boxes(names: list[str], has: Mapping[str, str], top: float, width: float) -> tuple[list[str], float]:
    """Return the boxes of a floor as SVG, and where the next floor begins."""
    letters = int((width - 2 * PADDING) / LETTER)
    texts = {name: textwrap.wrap(has[name], letters) for name in names}
    height = 2 * PADDING + LINE * (1 + max(map(len, texts.values())))
    left, drawn = (WIDTH - len(names) * (width + GAP) + GAP) / 2, []
    for number, (name, lines) in enumerate(texts.items()):
        x, y = left + number * (width + GAP), top + PADDING + 11
        drawn.append(f'<rect x="{x:g}" y="{top:g}" width="{width:g}" height="{height:g}" rx="5"/>')
        drawn.append(f'<text class="room" x="{x + PADDING:g}" y="{y:g}">{escape(name)}</text>')
        places = ((x + PADDING, y + LINE * below, line) for below, line in enumerate(lines, start=1))
        drawn += [f'<text x="{a:g}" y="{b:g}">{escape(line)}</text>' for a, b, line in places]
    return drawn, top + height + GAP


STYLE = (
    "rect{fill:#eef3fb;stroke:#4a6fa5} text{font:11px sans-serif;fill:#222} .room{font:bold 12px monospace} "
    ".page{fill:#fff;stroke:none}"
)


def picture(page: str) -> Iterator[str]:
    """Yield the lines of the SVG."""
    found = rooms(page)
    has, top, drawn = {name: text for name, (text, _) in found.items()}, float(GAP), list[str]()
    for names in floors({name: below for name, (_, below) in found.items()}):
        width = min(460.0, (WIDTH - 2 * GAP - (len(names) - 1) * GAP) / len(names))
        parts, top = boxes(names, has, top, width)
        drawn += parts
    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top:g}" width="{WIDTH}" height="{top:g}">'
    yield f"<title>The rooms of mxstudy: each imports from those below it</title><style>{STYLE}</style>"
    yield f'<rect class="page" width="{WIDTH}" height="{top:g}"/>'
    yield from drawn
    yield "</svg>\n"


def main() -> None:
    PICTURE.write_text("\n".join(picture(PAGE.read_text())))


if __name__ == "__main__":
    main()
