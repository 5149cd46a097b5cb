"""The diagrams of the concept pages, as SVG that needs nothing from elsewhere.

python -m docs.generate.diagrams    # writes docs/images/diagram-*.svg
"""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from pathlib import Path

from docs.generate.results import read

IMAGES = Path(__file__).parents[1] / "images"
FILLS = {"ours": "#fbe9e7", "strong": "#ff8a65", "other": "#eceff1", "data": "#e3f2fd", "plain": "#ffffff"}
EDGES = {"ours": "#d84315", "strong": "#bf360c", "other": "#546e7a", "data": "#1565c0", "plain": "#90a4ae"}
_HEAD = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" \
font-family="system-ui, -apple-system, 'Segoe UI', 'Helvetica Neue', Arial, sans-serif" font-size="14">
<title>{title}</title>
<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" \
orient="auto-start-reverse"><path d="M0 0L10 5L0 10z" fill="#37474f"/></marker></defs>
<rect width="{width}" height="{height}" rx="10" fill="#ffffff"/>
"""


def box(x: float, y: float, w: float, h: float, text: str, kind: str = "ours", *, small: str = "") -> str:
    """A rectangle with lines of text in its middle, and smaller ones below them."""
    shape = (
        f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="6" fill="{FILLS[kind]}" stroke="{EDGES[kind]}" '
        'stroke-width="1.3"/>'
    )
    lines = [(line, 14, 600) for line in text.split("\n") if line] + [
        (line, 12, 400) for line in small.split("\n") if line
    ]
    top = y + h / 2 - 17 * len(lines) / 2 + 12.5
    middle = x + w / 2
    return shape + "".join(
        f'<text x="{middle}" y="{top + 17 * number}" text-anchor="middle" font-size="{size}" font-weight="{weight}" '
        f'fill="#212121">{html.escape(line)}</text>'
        for number, (line, size, weight) in enumerate(lines)
    )


def frame(x: float, y: float, w: float, h: float, title: str, kind: str = "plain") -> str:
    """A rectangle around others, with a title at its top left."""
    return (
        f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="8" fill="{FILLS[kind]}" fill-opacity="0.55" '
        f'stroke="{EDGES[kind]}" stroke-width="1.3" stroke-dasharray="5 3"/>' + note(x + 12, y + 21, title, bold=True)
    )


def note(x: float, y: float, text: str, *, anchor: str = "start", bold: bool = False, color: str = "#37474f") -> str:
    """Lines of text."""
    weight = 600 if bold else 400
    return "".join(
        f'<text x="{x}" y="{y + 17 * number}" text-anchor="{anchor}" font-size="13" font-weight="{weight}" '
        f'fill="{color}">{html.escape(line)}</text>'
        for number, line in enumerate(text.split("\n"))
    )


def arrow(
    *points: tuple[float, float], text: str = "", at: tuple[float, float] | None = None, both: bool = False
) -> str:
    """A line through points with a tip at its end, and perhaps a label."""
    path = " ".join(f"{x},{y}" for x, y in points)
    start = ' marker-start="url(#tip)"' if both else ""
    line = f'<polyline points="{path}" fill="none" stroke="#37474f" stroke-width="1.5" marker-end="url(#tip)"{start}/>'
    if not text:
        return line
    x, y = at or ((points[0][0] + points[-1][0]) / 2 + 6, (points[0][1] + points[-1][1]) / 2 - 5)
    return line + note(x, y, text)


def svg(title: str, width: int, height: int, parts: Sequence[str]) -> str:
    return _HEAD.format(title=html.escape(title), width=width, height=height) + "\n".join(parts) + "\n</svg>\n"


def call() -> str:
    x, w = 190, 300
    parts = [
        box(x, 16, w, 44, "pipeline calls transformer(...)", "other"),
        arrow((340, 60), (340, 84)),
        box(x, 84, w, 52, "Which request, which branch?", small="cache_context, or the conditioning's values"),
        arrow((340, 136), (340, 160)),
        box(x, 160, w, 52, "bypass", "strong", small="may a hook answer without running anything?"),
        arrow((340, 212), (340, 238), text="no", at=(350, 230)),
        box(x, 238, w, 52, "pre_forward of every hook", small="shard, cache, offload, other"),
        arrow((340, 290), (340, 314)),
        box(
            x,
            314,
            w,
            62,
            "new_forward, or the module itself",
            "other",
            small="hooks of other libraries, compiled graph,\nforward",
        ),
        arrow((340, 376), (340, 400)),
        box(x, 400, w, 52, "post_forward of every hook", small="in reverse order"),
        arrow((340, 452), (340, 476)),
        box(x, 476, w, 40, "output", "other"),
        arrow(
            (490, 186),
            (580, 186),
            (580, 496),
            (490, 496),
            text="yes: no other hook runs,\nno weight moves",
            at=(505, 150),
        ),
        arrow((190, 345), (110, 345), (110, 420)),
        note(72, 335, "if anything raises", color="#bf360c"),
        box(20, 420, 150, 70, "failed_forward", "ours", small="innermost first, then\nthe error goes on"),
    ]
    return svg("Life of a call", 690, 532, parts)


def order() -> str:
    layers = [
        ("shard: this rank's part of the sequence or batch", "data"),
        ("cache: may answer here, and then nothing inside runs", "ours"),
        ("offload: brings the weights of this block", "other"),
        ("other: your hooks, by name", "plain"),
    ]
    parts = [
        frame(100 + 26 * n, 16 + 40 * n, 540 - 52 * n, 300 - 66 * n, title, kind)
        for n, (title, kind) in enumerate(layers)
    ]
    parts += [
        box(216, 180, 308, 44, "module or its compiled graph", "strong"),
        arrow((16, 202), (214, 202)),
        note(16, 192, "call"),
        arrow((526, 202), (724, 202)),
        note(680, 192, "output"),
    ]
    return svg("Order of hooks", 740, 334, parts)


def cached_step() -> str:
    parts = [
        box(270, 14, 260, 40, "call of the denoiser", "other"),
        arrow((400, 54), (400, 76)),
        box(230, 76, 340, 52, "clock", small="which step of which run? is the history still valid?"),
        arrow((400, 128), (400, 150)),
        box(230, 150, 340, 52, "judge", small="guards, schedule, what changed in the inputs"),
        arrow((400, 202), (400, 222), (110, 222), (110, 246), text="compute", at=(120, 238)),
        arrow((400, 202), (400, 246), text="ask", at=(408, 238)),
        arrow((400, 202), (400, 222), (690, 222), (690, 246), text="skip", at=(700, 238)),
        box(
            290,
            246,
            220,
            56,
            "signal",
            "strong",
            small="what reaches the first attention,\ncompared with the last step",
        ),
        arrow((290, 274), (200, 274), text="changed", at=(222, 266)),
        arrow((510, 274), (590, 274), text="not much", at=(520, 266)),
        box(20, 246, 180, 56, "compute", "other", small="the model's own\nforward, bare"),
        box(590, 246, 200, 56, "skip", "ours", small="blocks bypassed, or\nno forward at all"),
        arrow((110, 302), (110, 356), (228, 356)),
        arrow((690, 302), (690, 356), (572, 356)),
        box(230, 330, 340, 52, "record", small="residuals or outputs for later steps; a line for stats()"),
        arrow((400, 382), (400, 406)),
        box(270, 406, 260, 40, "output", "other"),
    ]
    return svg("A cached step", 810, 460, parts)


def ring() -> str:
    def lane(y: float, spans: Sequence[tuple[float, float, str, str]]) -> list[str]:
        return [box(120 + start, y, length, 34, text, kind) for start, length, text, kind in spans]

    parts = [
        frame(16, 14, 210, 118, "host memory, pinned", "other"),
        *[box(30 + 47 * n, 50, 40, 62, f"b{n}", "data") for n in range(4)],
        frame(300, 14, 424, 118, "GPU memory, within the budget", "ours"),
        box(316, 50, 92, 62, "stays", "plain", small="b0, b3, ..."),
        box(424, 50, 160, 62, "ring", "strong", small="blocks come in\nas room gets free"),
        box(600, 50, 108, 62, "activations", "plain"),
        arrow((226, 81), (298, 81), text="copy", at=(244, 74)),
        note(16, 174, "compute"),
        *lane(
            152,
            [
                (0, 70, "b0", "plain"),
                (70, 90, "b1", "ours"),
                (160, 90, "b2", "ours"),
                (250, 70, "b3", "plain"),
                (320, 90, "b4", "ours"),
                (410, 70, "b0", "plain"),
                (480, 90, "b1", "ours"),
            ],
        ),
        note(16, 218, "copy"),
        *lane(
            196,
            [
                (0, 68, "b1", "data"),
                (70, 84, "b2", "data"),
                (178, 84, "b4", "data"),
                (330, 84, "b1", "data"),
                (432, 84, "b2", "data"),
            ],
        ),
        '<line x1="530" y1="146" x2="530" y2="236" stroke="#bf360c" stroke-dasharray="4 3"/>',
        note(536, 252, "next step: its first blocks are already on their way", color="#bf360c", anchor="middle"),
        arrow((120, 280), (720, 280), text="time", at=(690, 274)),
        note(16, 306, "A block that stays costs memory; one that streams costs bus time, free while others compute."),
    ]
    return svg("Streaming through a ring", 740, 322, parts)


def bus() -> str:
    """What crosses the bus in a step, to scale."""
    flux = read("gpu_offload")["flux"]
    weights, ahead, wire = flux["weights_gib"], flux["ahead_gib"], flux["least"]["wire_gib"]
    whole, gap = 690, 6
    x = 30 + whole * ahead / weights + gap
    early, middle, sent = x - 30 - gap, (30 + x - gap) / 2, whole * wire / weights
    parts = [
        frame(14, 12, 728, 92, f"host memory: {weights:.1f} GiB of weights, FLUX.1 12B", "other"),
        box(30, 44, early, 48, f"{ahead:.1f} GiB", "ours", small="see time alone"),
        box(x, 44, whole - early, 48, f"{weights - ahead:.1f} GiB", "data", small="see the image or the text"),
        arrow((x + 60, 92), (x + 60, 138), text="compressed at set-up: the exponent becomes 3 bits", at=(x + 70, 124)),
        box(x, 138, sent, 42, f"{wire:.1f} GiB cross the bus in a step", "strong"),
        note(x + sent + 12, 156, f"pinned: {flux['pinned_of_weights']:.0%}\nof the weights"),
        frame(14, 212, 728, 118, "", "ours"),
        note(728, 233, "GPU memory", anchor="end", bold=True),
        arrow((middle, 92), (middle, 250), text="once a run,\nby layer", at=(middle + 8, 142)),
        arrow((x + 60, 180), (x + 60, 250), text="while other blocks compute", at=(x + 70, 200)),
        box(30, 250, early, 64, "outputs", "ours", small="for all steps;\neach uses a few MiB"),
        box(x, 250, 170, 64, "decode", "strong", small="into the ring,\nthe same bits"),
        arrow((x + 170, 282), (x + 220, 282)),
        box(x + 220, 250, 200, 64, "compute", "plain", small="block by block"),
        arrow((middle, 314), (middle, 350), (x + 320, 350), (x + 320, 316)),
        note(middle + 12, 367, "stand in for the layers"),
    ]
    return svg("What crosses the bus", 756, 380, parts)


def processes() -> str:
    parts = [
        box(10, 56, 130, 52, "clients", "other", small="OpenAI, curl, page"),
        frame(190, 14, 300, 308, "samovar serve: the server process", "ours"),
        box(210, 52, 260, 52, "HTTP", "ours", small="keys, limits, strict JSON, streaming"),
        arrow((140, 80), (208, 80), both=True),
        arrow((340, 104), (340, 126)),
        box(210, 126, 260, 52, "queue", "ours", small="bounded; priority and deadline"),
        arrow((340, 178), (340, 200)),
        box(
            210,
            200,
            260,
            66,
            "supervisor thread",
            "strong",
            small="one job at a time; watches steps,\nreplaces a dead or hung worker",
        ),
        note(210, 296, "takes no GPU memory"),
        frame(570, 14, 250, 308, "workers: one process per rank", "other"),
        box(590, 52, 210, 66, "rank 0", "other", small="pipeline, hooks, GPU 0\nprogress and previews"),
        box(590, 140, 210, 52, "rank 1 ...", "other", small="pipeline, hooks, GPU 1 ..."),
        arrow((695, 118), (695, 138), both=True, text="NCCL or gloo", at=(702, 132)),
        arrow((470, 222), (530, 222), (530, 84), (588, 84), both=True),
        arrow((530, 166), (588, 166)),
        note(500, 246, "pipes"),
        box(590, 228, 210, 60, "images", "data", small="anonymous shared memory:\nnothing stays in /dev/shm"),
        arrow((588, 258), (492, 258)),
    ]
    return svg("Processes of the server", 836, 338, parts)


def splitting() -> str:
    shared = "ring: own queries, keys pass round\ngathered: own queries, all keys"

    def tokens(x: float, y: float, kinds: Sequence[str]) -> list[str]:
        return [
            f'<rect x="{x + 22 * n}" y="{y}" width="20" height="26" rx="3" fill="{FILLS[kind]}" '
            f'stroke="{EDGES[kind]}"/>'
            for n, kind in enumerate(kinds)
        ]

    parts = [
        note(16, 34, "tokens", bold=True),
        *tokens(100, 16, ["ours"] * 6 + ["data"] * 6),
        arrow((160, 46), (120, 78)),
        arrow((300, 46), (500, 78)),
        note(400, 34, "split at the model's input, or before the first block"),
        frame(16, 80, 330, 204, "rank 0", "ours"),
        frame(394, 80, 330, 204, "rank 1", "data"),
        *tokens(120, 90, ["ours"] * 6),
        *tokens(498, 90, ["data"] * 6),
        box(32, 126, 298, 38, "", "plain", small="norms, MLP, projections: its own tokens"),
        box(410, 126, 298, 38, "", "plain", small="norms, MLP, projections: its own tokens"),
        box(
            32,
            176,
            298,
            94,
            "attention",
            "strong",
            small="Ulysses: half of the heads, all tokens\n" + shared,
        ),
        box(
            410,
            176,
            298,
            94,
            "attention",
            "strong",
            small="Ulysses: the other half of the heads\n" + shared,
        ),
        arrow((332, 222), (408, 222), both=True),
        box(336, 196, 68, 20, "", "plain", small="exchange"),
        arrow((180, 286), (330, 312)),
        arrow((560, 286), (410, 312)),
        box(250, 312, 240, 36, "gather: the whole output", "other"),
    ]
    return svg("Splitting a sequence", 740, 362, parts)


DIAGRAMS: dict[str, Callable[[], str]] = {
    "call": call,
    "order": order,
    "cached-step": cached_step,
    "ring": ring,
    "bus": bus,
    "processes": processes,
    "splitting": splitting,
}

if __name__ == "__main__":
    for name, draw in DIAGRAMS.items():
        (IMAGES / f"diagram-{name}.svg").write_text(draw(), encoding="utf-8")
