"""Draws the diagrams of docs/pictures, and the chart of docs/measuring.md from its tables.

    python tools/draw_diagrams.py

The diagrams need no run; tools/draw_pictures.py draws one from a run.
"""

import dataclasses
import html
import pathlib
import re
from collections.abc import Callable, Iterable, Sequence

_DOCS = pathlib.Path(__file__).parents[1] / "docs"
_COLORS = {
    "target": "#dbe5f1",
    "drafter": "#fde3c8",
    "data": "#eef0f2",
    "accepted": "#cfe8d0",
    "rejected": "#f6d0d0",
    "measured": "#228833",
    "forecast": "#4477aa",
    "published": "#bbbbbb",
}
_SIZE = 13
Point = tuple[float, float]


@dataclasses.dataclass
class Scene:
    """Drawing that grows by boxes, texts and arrows.

    Attributes:
      width, height: Size in pixels.
      parts: SVG elements.
    """

    width: int
    height: int
    parts: list[str] = dataclasses.field(default_factory=list)

    def text(self, x: float, y: float, text: str, *, size: int = _SIZE, anchor: str = "start"):
        """Adds one line of text; y is its baseline."""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}">'
            f"{html.escape(text)}</text>"
        )

    def box(self, x: float, y: float, width: float, height: float, text: str, kind: str):
        """Adds a box with centered lines of text."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5" '
            f'fill="{_COLORS[kind]}" stroke="#667"/>'
        )
        lines = text.split("\n") if text else []
        for number, line in enumerate(lines):
            below = y + height / 2 + (number - (len(lines) - 1) / 2) * 17 + 4.5
            self.text(x + width / 2, below, line, anchor="middle")

    def arrow(self, *points: Point, label: str = "", at: Point = (0, 0)):
        """Adds a line through points that ends in an arrow head, and a label at a place."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.parts.append(
            f'<polyline points="{path}" fill="none" stroke="#445" marker-end="url(#head)"/>'
        )
        if label:
            self.text(*at, label, size=12)

    def svg(self) -> str:
        """Returns the drawing as SVG."""
        head = (
            '<defs><marker id="head" markerWidth="9" markerHeight="8" refX="8" refY="4" '
            'orient="auto"><path d="M0,0 L9,4 L0,8 z" fill="#445"/></marker></defs>'
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" font-family="sans-serif" fill="#222">\n'
            f'<rect width="{self.width}" height="{self.height}" fill="#fff"/>\n{head}\n'
            + "\n".join(self.parts)
            + "\n</svg>\n"
        )


def cycle() -> str:
    """Returns the drawing of one cycle."""
    scene = Scene(760, 250)
    scene.box(20, 40, 150, 60, "drafter\nproposes 4 tokens", "drafter")
    scene.box(240, 40, 170, 60, "target\none pass over 5 rows", "target")
    scene.box(480, 40, 130, 60, "verify\nand commit", "target")
    scene.arrow((170, 70), (238, 70))
    scene.arrow((410, 70), (478, 70), label="logits", at=(424, 62))
    scene.arrow((545, 40), (545, 16), (95, 16), (95, 38))
    scene.text(180, 30, "committed tokens and the target's hidden states", size=12)
    words = [
        ("anchor", "data"), ("draft 1", "accepted"), ("draft 2", "accepted"),
        ("draft 3", "rejected"), ("draft 4", "rejected"),
    ]  # fmt: skip
    for place, (word, kind) in enumerate(words):
        scene.box(20 + place * 96, 140, 90, 30, word, kind)
    scene.box(20 + 3 * 96, 186, 90, 30, "bonus", "target")
    scene.text(520, 160, "rows that the target verifies")
    scene.text(520, 206, "its own token in place of draft 3,")
    scene.text(520, 223, "and the anchor of the next cycle")
    scene.text(20, 240, "3 tokens for one pass of the target: acceptance length 3", size=12)
    return scene.svg()


def caches() -> str:
    """Returns the drawing of the two caches."""
    scene = Scene(760, 270)
    scene.text(20, 24, "target: pages of a shared pool", size=15)
    scene.text(400, 24, "block drafter: one array for each slot", size=15)
    for place, owner in enumerate(("A", "A", "B", "A", "", "B", "B", "")):
        kind, name = ("target", f"{owner} {place + 1}") if owner else ("data", "free")
        scene.box(20 + place % 4 * 82, 44 + place // 4 * 52, 74, 44, name, kind)
    scene.text(20, 172, "page table of slot A: 1, 2, 4", size=12)
    scene.text(20, 190, "page table of slot B: 3, 6, 7", size=12)
    for place, (name, length) in enumerate((("A", 0.8), ("B", 0.9))):
        y = 44 + place * 52
        scene.box(400, y, 330, 44, "", "data")
        scene.box(400, y, 330 * length, 44, f"{name}: rows 0 … length − 1", "drafter")
    scene.text(400, 172, "its blocks attend in both directions,", size=12)
    scene.text(400, 190, "so its context is not paged", size=12)
    scene.box(120, 200, 108, 30, "target pass", "target")
    scene.arrow((230, 215), (470, 215), label="features of committed rows", at=(272, 208))
    scene.box(472, 200, 108, 30, "observe", "drafter")
    scene.text(20, 256, "Rows past a sequence's length are stale and get overwritten.", size=12)
    return scene.svg()


def pages() -> str:
    """Returns the drawing of slots and pages."""
    scene = Scene(760, 280)
    scene.text(20, 24, "requests", size=15)
    scene.text(200, 24, "slots of the batch", size=15)
    scene.text(440, 24, "pages", size=15)
    for place, name in enumerate(("request 7", "request 8", "request 9 (waits)")):
        scene.box(20, 40 + place * 50, 140, 38, name, "data")
    for place in range(8):
        kind = "accepted" if place == 0 else "target" if place < 7 else "data"
        name = str(place + 1) if place else "1: shared"
        scene.box(440 + place % 4 * 76, 52 + place // 4 * 60, 68, 44, name, kind)
    slots = (("request 5", "1, 2, 5"), ("request 7", "1, 3"), ("request 8", "4, 6, 7"))
    for place, (name, owned) in enumerate(slots):
        scene.box(200, 40 + place * 50, 160, 38, f"slot {place}: {name}", "target")
        scene.text(206, 222 + place * 18, f"slot {place} → pages {owned}", size=12)
    scene.arrow((160, 59), (198, 109))
    scene.arrow((160, 109), (198, 159))
    scene.arrow((360, 59), (438, 70))
    scene.arrow((360, 109), (438, 84))
    sentences = (
        "Slots 0 and 1 begin with the same tokens, so they",
        "share a full page. When no page is free, the youngest",
        "sequence returns to the queue; its output stays the same.",
    )
    for place, sentence in enumerate(sentences):
        scene.text(400, 190 + place * 18, sentence, size=12)
    return scene.svg()


def distill() -> str:
    """Returns the drawing of the stages of a distillation."""
    scene = Scene(760, 190)
    stages = (
        ("questions", "data", "answers.files"),
        ("answers\nof the target", "target", "answers.jsonl"),
        ("training", "drafter", "training/"),
        ("test: with and\nwithout drafts", "target", "test.json"),
        ("drafter and\nmodel card", "drafter", "drafter/"),
    )
    for place, (name, kind, file) in enumerate(stages):
        x = 20 + place * 148
        scene.box(x, 50, 120, 60, name, kind)
        scene.text(x + 60, 132, file, size=12, anchor="middle")
        if place:
            scene.arrow((x - 28, 80), (x - 2, 80))
    scene.text(20, 28, "dflash distill: one command, five stages", size=15)
    sentence = "Each stage ends with a file. The same command continues after the last one."
    scene.text(20, 166, sentence, size=12)
    return scene.svg()


def mesh() -> str:
    """Returns the drawing of a mesh of eight chips."""
    scene = Scene(760, 290)
    scene.text(20, 24, "mesh.data=2 mesh.tensor=4 on eight chips", size=15)
    for data in range(2):
        y = 50 + data * 100
        scene.text(20, y + 40, f"replica {data}")
        for tensor in range(4):
            shards = "\n".join(f"{name} {tensor + 1}/4" for name in ("heads", "mlp", "vocabulary"))
            scene.box(100 + tensor * 120, y, 110, 70, shards, "target")
        scene.text(600, y + 32, "its own slots", size=12)
        scene.text(600, y + 50, "and pages", size=12)
    sentence = "tensor: each chip reads a quarter of the weights; two all-reduces per layer"
    scene.text(100, 262, sentence, size=12)
    scene.text(100, 280, "data: replicas exchange nothing while they decode", size=12)
    return scene.svg()


Row = tuple[str, float, str]


def speed_rows(page: str) -> list[Row]:
    """Returns (what, speed-up, kind) of each row of the page's tables that the chart shows."""
    rows, kind = [], ""
    for line in page.splitlines():
        heading = re.match(r"### (Measured|Forecast|Published)", line)
        if line.startswith(("## ", "### ")):
            kind = heading[1].lower() if heading else ""
        cells = re.match(r"\| ([^|]+) \| (\d+\.\d+) ×", line)
        if kind and cells:
            rows.append((cells[1], float(cells[2]), kind))
    return rows


def speed() -> str:
    """Returns the chart of docs/measuring.md."""
    return chart(speed_rows((_DOCS / "measuring.md").read_text(encoding="utf-8")))


def chart(rows: Sequence[Row]) -> str:
    """Returns a bar chart of speed-ups; the color says how a figure was obtained."""
    scene = Scene(760, 70 + 30 * len(rows))
    longest = max(value for _, value, _ in rows)
    for place, kind in enumerate(("measured", "forecast", "published")):
        scene.box(20 + place * 130, 14, 14, 14, "", kind)
        scene.text(40 + place * 130, 26, kind)
    for place, (name, value, kind) in enumerate(rows):
        y = 46 + 30 * place
        scene.text(340, y + 15, name, size=12, anchor="end")
        scene.box(350, y, 350 * value / longest, 20, "", kind)
        scene.text(356 + 350 * value / longest, y + 15, f"{value:.2f}×", size=12)
    scene.parts.append(
        f'<line x1="{350 + 350 / longest:g}" x2="{350 + 350 / longest:g}" y1="40" '
        f'y2="{46 + 30 * len(rows)}" stroke="#222" stroke-dasharray="2,3"/>'
    )
    scene.text(350 + 350 / longest, 62 + 30 * len(rows), "1×: plain decoding", size=11)
    return scene.svg()


DIAGRAMS: dict[str, Callable[[], str]] = {
    "cycle": cycle, "caches": caches, "pages": pages, "distill": distill, "mesh": mesh,
    "speed": speed,
}  # fmt: skip


def main(names: Iterable[str] = DIAGRAMS) -> None:
    """Writes the drawings."""
    for name in names:
        (_DOCS / "pictures" / f"{name}.svg").write_text(DIAGRAMS[name](), encoding="utf-8")


if __name__ == "__main__":
    main()
