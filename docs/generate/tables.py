"""Every table of measured values in the documentation, made from the results.

python -m docs.generate.tables    # writes the table at the top of the README
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.regimes_table import lines_of
from docs.generate.results import TITLES, markdown_table, read, time_and_peak

SCHEDULE, TAYLOR, PLAIN = "samovar schedule", "diffusers TaylorSeer lite", "plain steps"
_SPARE = 1.05
"""What counts as the speed of a model with all weights on the GPU."""
README = Path(__file__).parents[2] / "README.md"


def nearest_row(family: str, computed: float) -> dict[str, Any]:
    """The row of a quality curve whose number of computed steps is nearest."""
    rows = [row for row in read("quality")["rows"] if row["family"] == family]
    return min(rows, key=lambda row: (abs(row["computed"] - computed), row["computed"]))


def allowed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of a curve whose budget was enough."""
    return [row for row in rows if "refused" not in row]


def at_speed(found: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The row with the least memory that is hardly slower than the model with all weights on the GPU."""
    limit = _SPARE * found["resident"]["ms"]
    return next((row for row in allowed(rows) if row["ms"] <= limit), found["resident"])


def _when(found: Any) -> str:
    """The day of a figure that is of an earlier run than those beside it."""
    return f" (run of {found['earlier']['date']})" if "earlier" in found else ""


def headlines(folder: str = "") -> str:
    """The figures of the README and the home page; `folder` is where results are, seen from the page."""
    place = folder or "benchmarks/results"
    offload, compose = read("gpu_offload"), read("gpu_compose")
    cache = read("gpu_cache")["models"]["flux"]["skipped"]
    flux, qwen, peers = offload["flux"], offload["qwen"], offload["peers"]
    quick, quick_before = at_speed(flux, flux["curve"]), at_speed(flux, flux["before"]["curve"])
    ours, taylor, plain = (nearest_row(family, 16) for family in (SCHEDULE, TAYLOR, PLAIN))
    regimes = [line for line in lines_of(read("regimes")["cells"]) if line.auto is not None]
    ahead = [line.auto.psnr - line.best.point.psnr for line in regimes if line.auto is not None]
    graphs = read("gpu_graphs")["parts"]["flux-512"]["computed"]
    whole, card, group = (read("gpu_cards")["flux"][way] for way in ("resident", "11GiB", "diffusers-group"))
    rows = [
        [
            "FLUX.1 from prompt to image in 4 steps, on a card of 11 GiB, same bits",
            f"**{card['seconds']['4']:.2f} s**, {max(card['reserved'].values()):.1f} GiB",
            f"everything on a larger card: {whole['seconds']['4']:.2f} s, {max(whole['reserved'].values()):.1f} GiB; "
            f"diffusers group offload: {group['seconds']['4']:.2f} s",
            "gpu_cards",
        ],
        [
            "FLUX.1 12B in the least memory, same bits",
            f"**{flux['least']['peak_gib']:.1f} GiB** instead of {flux['resident']['peak_gib']:.1f}, "
            f"{flux['least']['ms']:.0f} ms a step instead of {flux['resident']['ms']:.0f}",
            f"diffusers group offload: {peers['group_peak_gib']:.1f} GiB, {peers['group_ms']:.0f} ms{_when(peers)}",
            "gpu_offload",
        ],
        [
            "Qwen-Image 20B in the least memory, same bits",
            f"**{qwen['least']['peak_gib']:.1f} GiB** instead of {qwen['resident']['peak_gib']:.1f}, "
            f"{qwen['least']['ms']:.0f} ms a step instead of {qwen['resident']['ms']:.0f}",
            f"without computing ahead and compression: {qwen['before']['least']['ms']:.0f} ms{_when(qwen['before'])}",
            "gpu_offload",
        ],
        [
            "FLUX.1 12B at the speed of the whole model, same bits",
            f"**{quick['peak_gib']:.1f} GiB**, {100 * (quick['ms'] / flux['resident']['ms'] - 1):.1f} % slower",
            f"without computing ahead and compression: {quick_before['peak_gib']:.1f} GiB",
            "gpu_offload",
        ],
        [
            "Cost of a skipped step, FLUX.1 12B",
            f"**{cache['samovar reuse']['percent_of_bare']:.1f} %** of a forward; "
            f"{cache['samovar linear of output, schedule']['percent_of_bare']:.1f} % with a schedule",
            f"FirstBlockCache {cache['diffusers FirstBlockCache']['percent_of_bare']:.1f} %, cache-dit "
            f"{cache['cache-dit DBCache F1B0']['percent_of_bare']:.1f} %",
            "gpu_cache",
        ],
        [
            "Half of the steps skipped, blocks streamed, FLUX.1 12B",
            f"**{100 * compose['flux']['cache_layerwise_of_layerwise']:.0f} %** of the time without the cache",
            "a skipped step moves no weights",
            "gpu_compose",
        ],
        [
            "A forward replayed as a graph, FLUX.1 12B at 512 px, same bits",
            f"**{graphs['graphs']['ms']:.0f} ms**",
            f"eager torch: {graphs['eager']['ms']:.0f} ms",
            "gpu_graphs",
        ],
        [
            "Quality with nothing tuned (`auto`), built-in model of 13 M parameters, 24 regimes",
            f"**{statistics.fmean(ahead):+.1f} dB** PSNR on average, ahead in {sum(gain >= 0 for gain in ahead)} of "
            f"{len(ahead)} comparisons",
            "the best of plain steps and five caches, chosen anew in each",
            "regimes",
        ],
        [
            "Quality with a tuned schedule, 16 of 50 steps computed, built-in model of 13 M parameters",
            f"**{ours['psnr']:.0f} dB** PSNR to the exact images",
            f"TaylorSeer {taylor['psnr']:.0f} dB, 16 plain steps {plain['psnr']:.0f} dB",
            "quality",
        ],
    ]
    table = [[what, us, other, f"[result]({place}/{name}.json)"] for what, us, other, name in rows]
    up = folder.removesuffix("benchmarks/results")  # To the root of the repository; the docs are one folder below it.
    models = f"{up.removeprefix('../')}reference/models.md" if folder else "docs/reference/models.md"
    table.append(
        [
            "diffusers transformer classes that can be cached",
            "**76 of 76**, no code for any model",
            "FirstBlockCache: 15",
            f"[table]({models})",
        ]
    )
    return markdown_table(["", "Samovar", "compared with", ""], table)


def cards(_: str) -> str:
    """Whole pipelines, from prompt to image, on cards that have no more memory than the budget."""
    names = {
        "flux": "FLUX.1-dev",
        "klein": "FLUX.2 klein 4B",
        "z_image": "Z-Image",
        "qwen": "Qwen-Image",
        "sd35": "SD3.5-large",
        "wan": "Wan 2.1 14B, 81 frames of 832 x 480",
    }
    rows = [_card_row(names[name], way, row) for name in names for way, row in read("gpu_cards").get(name, {}).items()]
    head = ["pipeline, 1024 x 1024", "", "card", "steps", "time", "of resident", "reserved at most", "resident's bits"]
    return markdown_table(head, rows) + f"\n\n{read('gpu_cards')['about']['note']}"


def _card_row(name: str, way: str, row: Mapping[str, Any]) -> list[str]:
    how = {"resident": "everything on the GPU", "samovar": "`gpu_memory`"}.get(
        row["way"], row["way"].replace("-", ", ")
    )
    limit = (row["limit"] or "").replace("GiB", " GiB")
    if "error" in row:
        return [name, how, limit, "", row["error"].split(":")[0], "", "", ""]
    times = ", ".join(f"{seconds:.2f} s" for seconds in row["seconds"].values())
    shares = ", ".join(f"{share:.2f}" for share in row["of_resident"].values())
    bits = f"{row['same_images']} of {row['of_images']} images"
    return [
        name,
        how,
        limit,
        ", ".join(row["seconds"]),
        times,
        shares,
        f"{max(row['reserved'].values()):.2f} GiB",
        bits,
    ]


def quality(_: str) -> str:
    """Every method of the quality benchmark."""
    rows = [
        [
            row["method"].replace("hard pictures", "outliers"),
            f"{row['computed']:g}",
            f"{row['psnr']:.1f}",
            f"{min(row['each']['psnr']):.0f}",
            f"{row['lpips']:.5f}",
            f"{row['ssim']:.4f}",
        ]
        for row in read("quality")["rows"]
        if row["family"] != "exact" and "problem" not in row
    ]
    return markdown_table(["method", "computed of 50", "PSNR, dB", "worst image, dB", "LPIPS", "SSIM"], rows)


def promises(_: str) -> str:
    """What `samovar tune` found for each target, judged on held-out prompts."""
    rows = [
        [
            row["promise"],
            f"{row['held_out']['computed']:.1f}",
            f"{row['share_kept']:.1%}",
            f"{row['held_out']['psnr']:.1f} dB",
            f"{row['worst']['psnr']:.0f} dB, LPIPS {row['worst']['lpips']:.4f}",
            f"{row['plain_steps']['psnr']:.1f} dB",
        ]
        for row in read("quality")["promises"]
        if "problem" not in row
    ]
    head = ["target", "computed of 50", "images that meet it", "mean PSNR", "worst image", "as many plain steps"]
    return markdown_table(head, rows)


def cache_cost(_: str) -> str:
    """What a skipped step costs, ours and others'."""
    models = read("gpu_cache")["models"]
    rows = [["the model's own forward without its blocks"]]
    rows[0] += [f"{model['without_blocks']['percent_of_bare']:.2f} %" for model in models.values()]
    for name in models["flux"]["skipped"]:
        rows.append([name, *(f"{model['skipped'][name]['percent_of_bare']:.2f} %" for model in models.values())])
    return markdown_table(["skipped step, % of a full forward", *(model["title"] for model in models.values())], rows)


def cache_runs(_: str) -> str:
    """What whole runs gain, against what their counts promise."""
    models = read("gpu_cache")["models"]
    rows = []
    for model in models.values():
        for run in sorted(model["runs"], key=lambda run: str(run["setting"])):
            setting = run["setting"]
            kind = "tuned schedule" if "fitted" in setting else f"`{setting}`"
            kind = "`auto`, any error allowed" if "tolerance" in setting else kind
            counts = f"{run['computed']} of {run['computed'] + run['skipped']}"
            gains = f"{run['speedup']:.2f}x", f"{run['promised_by_counts']:.2f}x", f"{run['off_counts_percent']:+.1f} %"
            rows.append([model["title"], kind, counts, *gains])
    return markdown_table(["model", "setting", "computed", "speed-up", "by counts alone", "off"], rows)


def placement(_: str) -> str:
    """What comes of computing as many steps at other places."""
    result = read("regimes_placement")
    found = {(row["placement"], row["cell"].split("-")[2]): row for row in result["rows"]}
    rows = []
    for name in dict.fromkeys(row["placement"] for row in result["rows"]):
        each = [found[name, kind] for kind in ("pairs", "free")]
        rows.append([name, f"`{each[0]['mask']}`", *(f"{one['psnr']:.1f}, {one['psnr_worst']:.1f}" for one in each)])
    mask = result["rows"][0]["mask"]
    head = f"{mask.count('#')} of {len(mask)} steps"
    return markdown_table([head, "", "pairs: PSNR, worst", "free captions: PSNR, worst"], rows)


def combined(_: str) -> str:
    """Time and peak of every combination on a GPU."""
    result = read("gpu_compose")
    rows = []
    for name in result["flux"]["contestants"]:
        found = [result[model]["contestants"][name] for model in TITLES]
        rows.append([titled(name), *(f"{each['s']:.2f} s, {each['peak_gib']:.1f} GiB" for each in found)])
    rows.sort(key=lambda row: (row[0] != "nothing", row[0].count("+"), row[0]))
    return markdown_table(["20 steps with", *TITLES.values()], rows)


def titled(name: str) -> str:
    """A combination as readers know it: results name offload by its mode alone."""
    return name.replace("layerwise", "layerwise offload").replace("model", "model offload")


def offload(model: str) -> str:
    """Budgets of a model and what came of them."""
    found = read("gpu_offload")[model]
    before = {row["budget_gib"]: row for row in allowed(found["before"]["curve"])}
    rows = [
        [
            f"{row['budget_gib']:g} GiB",
            f"{row['peak_gib']:.2f} GiB",
            f"{row['streamed_blocks']} of {row['blocks']}",
            f"{row['wire_gib']:.1f} GiB",
            f"{row['ms']:.0f} ms",
            f"{row['planned_ms']:.0f} ms",
            f"{row['over_limit']:.1%}",
            f"{before[row['budget_gib']]['ms']:.0f} ms" if row["budget_gib"] in before else "",
        ]
        for row in allowed(found["curve"])
    ]
    head = ["budget", "measured peak", "blocks that stream", "cross the bus", "forward", "planned"]
    return markdown_table([*head, "above what bus and compute allow", "without both"], rows)


def offload_summary(_: str) -> str:
    """The figures of both models beside each other."""
    found = [read("gpu_offload")[model] for model in TITLES]

    def row(what: str, cell: Any) -> list[str]:
        return [what, *(cell(model) for model in found)]

    rows = [
        row("all weights on the GPU", lambda m: time_and_peak(m["resident"])),
        row("the same, layers that see time alone computed ahead", lambda m: time_and_peak(m["ahead"])),
        row("least memory", lambda m: time_and_peak(m["least"])),
        row("... what the bus alone would take", lambda m: f"{m['least']['bus_ms']:.0f} ms"),
        row(
            "... without computing ahead and compression",
            lambda m: time_and_peak(m["before"]["least"]) + _when(m["before"]),
        ),
        row("least memory within 5 % of all weights' speed", lambda m: time_and_peak(at_speed(m, m["curve"]))),
        row("... without computing ahead and compression", lambda m: time_and_peak(at_speed(m, m["before"]["curve"]))),
        row("batch of two in the least memory", lambda m: time_and_peak(m["batch_of_2"]["least"])),
        row(
            "... images a second, of those with all weights on the GPU",
            lambda m: f"{m['batch_of_2']['throughput']:.2f}",
        ),
        row("weights that see time alone", lambda m: f"{m['ahead_gib']:.1f} of {m['weights_gib']:.1f} GiB"),
        row("first step with a new prompt, 28 steps ahead", lambda m: f"{m['new_prompt_s']:.2f} s"),
        row("set-up", lambda m: f"{m['setup_s']:.1f} s"),
        row("pinned host memory, of the weights", lambda m: f"{m['pinned_of_weights']:.2f}"),
        row("... without computing ahead and compression", lambda m: f"{m['before']['pinned_of_weights']:.2f}"),
        row("same bits in every row", lambda m: "yes" if m["same_bits"] else "**no**"),
    ]
    return markdown_table(["one forward at 1024 x 1024", *TITLES.values()], rows)


def offload_models(_: str) -> str:
    """Every model in the least memory."""
    result = read("gpu_offload")
    rows = [
        [
            found["title"],
            f"{found['weights_gib']:.1f} GiB",
            f"{found['ahead_share']:.0%}",
            time_and_peak(found["resident"]),
            time_and_peak(found["least"]),
            f"{found['before']['least']['ms']:.0f} ms" if "before" in found else "not measured",
            "yes" if found["least"]["same_bits"] else "**no**",
        ]
        for found in (result.get(name) for name in ("flux", "qwen", "sd35", "hunyuan", "wan", "flux2"))
        if found is not None
    ]
    head = ["model", "weights", "see time alone", "all on the GPU", "least memory", "without both", "same bits"]
    return markdown_table(head, rows)


def coding(_: str) -> str:
    """How fast weights are decoded on a GPU."""
    found = read("gpu_coding")["decode_gb_s"]
    rows = [
        [
            f"{title} {dtype}",
            f"{found[dtype]['bits']:.1f}",
            *(f"{speed / 1000:.2f} TB/s" for speed in found[dtype][which]["gb_s"]),
        ]
        for title, dtype, which in (("decode", "bfloat16", "as used"), ("copy", "bfloat16", "a plain copy"))
    ]
    rows[1][1] = "16"
    return markdown_table(["output", "bits a weight", *(f"{size} MB" for size in found["megabytes"])], rows)


def disk(_: str) -> str:
    """A model that is larger than memory."""
    found = read("disk")
    gib = 2.0**30
    rows = [
        ["weights", f"{found['weights_bytes'] / gib:.1f} GiB"],
        ["`host_memory`", f"{found['host_memory'] / gib:.0f} GiB, of which {found['pinned_bytes'] / gib:.1f} pinned"],
        ["memory in no file, with that of the device", f"{found['memory_in_no_file_bytes'] / gib:.1f} GiB"],
        ["read from disk in a forward", f"{found['disk_bytes_a_forward'] / gib:.1f} GiB"],
        ["planned reading time", f"{found['planned_read_s']:.0f} s, at the measured speed of the disk"],
        ["a forward", f"{min(found['forward_s'][1:]):.0f} to {max(found['forward_s'][1:]):.0f} s"],
        ["the bare model, mapped from its files", f"{found['bare_s']:.0f} s"],
        ["same bits", "yes" if found["same_bits"] else "no"],
    ]
    return markdown_table(["Qwen-Image 20B on a CPU", ""], rows)


def offload_peers(_: str) -> str:
    """The same task by diffusers and accelerate."""
    result = read("gpu_offload")
    flux, peers = result["flux"], result["peers"]
    qwen, qwen_peers = result["qwen"], result.get("qwen-peers")
    rows = [
        [
            "least memory, one forward",
            time_and_peak(flux["least"]),
            f"diffusers group offload: {_group(peers)}{_when(peers)}",
        ],
        [
            "a step that the cache skips",
            f"{flux['skip']['skip_ms']:.1f} ms, {flux['skip']['skip_moved_bytes']} bytes moved",
            f"diffusers with FirstBlockCache: {peers['group_skip_ms']:.0f} ms",
        ],
        ["set-up", f"{flux['setup_s']:.1f} s", f"diffusers: {peers['group_setup_s']:.0f} s"],
        [
            "host memory, times the weights",
            f"{flux['host_gib_after'] / flux['weights_gib']:.2f}, {flux['pinned_of_weights']:.2f} of it pinned",
            f"diffusers: {peers['group_host_gib'] / flux['weights_gib']:.2f}",
        ],
    ]
    if qwen_peers is not None:
        rows.append(
            ["Qwen-Image, least memory", time_and_peak(qwen["least"]), f"diffusers group offload: {_group(qwen_peers)}"]
        )
    return markdown_table(["FLUX.1 12B", "Samovar", "peer"], rows)


def _group(peers: dict[str, Any]) -> str:
    return f"{peers['group_ms']:.0f} ms, {peers['group_peak_gib']:.2f} GiB"


def parallel(_: str) -> str:
    """Two CPU processes beside one."""
    rows = []
    for name, row in read("parallel")["rows"].items():
        if "refused" in row:
            rows.append([name, f"refused: {row['refused']}", "", "", ""])
        else:
            error, sent = f"{row['max_error']:.0e}", f"{row['sent_bytes'] / 2**20:.1f} MiB"
            rows.append([name, f"{row['elapsed']:.2f}", f"{row['work']:.2f}", sent, error])
    return markdown_table(["two ranks", "time, of one rank's", "work of each rank", "sent", "largest error"], rows)


def hooks(_: str) -> str:
    """What hooks add to a call."""
    rows = [
        [str(row["hooks"]), f"{row['ours_added_ns']} ns", f"{row['diffusers_added_ns']} ns", str(row["ratio_of_added"])]
        for row in read("hooks")["rows"]
    ]
    return markdown_table(["hooks", "Samovar adds", "diffusers adds", "ratio"], rows)


def server(_: str) -> str:
    """The server beside a plain FastAPI loop around the same pipeline."""
    found = read("server")["rows"]
    rows = [
        [
            title,
            f"{found[name]['pictures_per_second']:.2f}",
            f"{found[name]['between_pictures_ms']:.1f} ms",
            f"{found[name]['median_s']:.2f} s",
        ]
        for name, title in (("samovar", "samovar serve"), ("plain", "a plain FastAPI loop"))
    ]
    return markdown_table(["eight clients", "images per second", "idle between images", "one request alone"], rows)


_SERVING = {
    "builtin": ("the built-in model", "max_batch_1", "max_batch_16"),
    "cached": ("the built-in model, cache `auto`", "max_batch_1", "max_batch_16"),
    "flux256": ("FLUX.1 12B, 256 px, 8 steps", "max_batch_1", "max_batch_8"),
    "flux512": ("FLUX.1 12B, 512 px, 8 steps", "max_batch_1", "max_batch_8"),
    "flux1024": ("FLUX.1 12B, 1024 px, 4 steps", "max_batch_1", "max_batch_4"),
    "streamed": ("the same, streamed at the least memory; beside it resident", "", "max_batch_4"),
}


def serving(_: str) -> str:
    """Batches on a GPU, with clients that ask again and again."""
    found, rows = read("gpu_serving"), []
    for part, (title, alone, together) in _SERVING.items():
        if part in found:
            ratio, row = found[part]["ratio"], found[part][together]
            one = found[part][alone] if alone else found["flux1024"]["max_batch_4"]
            speed = lambda row: f"{row['images_s']:.2f}, p99 {row['p99_s']:.1f} s"  # noqa: E731
            goal = "" if ratio["goal"] is None else f"{ratio['goal']:g}"
            sizes = ", ".join(f"{count} of {size}" for size, count in row["batches"].items())
            rows.append([title, str(row["clients"]), speed(one), speed(row), sizes, f"{ratio['ratio']:.2f}", goal])
    head = ["model", "clients", "images a second, one at a time", "in batches", "batches", "ratio", "goal"]
    return markdown_table(head, rows)


def lora(_: str) -> str:
    """What an adapter costs on a GPU."""
    found = read("gpu_lora")
    titles = {"peft": "peft's", "peft_graphs": "peft's, graphs", "peft_layerwise": "peft's, streamed",
              "ours": "without scaling by 1", "ours_graphs": "without scaling by 1, graphs"}  # fmt: skip
    rows = [
        [title, f"{row['step_ms_none']:.0f} ms", f"{row['step_ms_a']:.0f} ms", f"{row['added_percent_a']:.1f} %",
         f"{row['switch_ms']:.1f} ms", "yes" if all(row[f"same_bits_{each}"] for each in ("none", "a", "b")) else "no"]
        for name, title in titles.items() if (row := found.get(name)) is not None
    ]  # fmt: skip
    return markdown_table(
        ["layers", "step without", "step with an adapter", "more", "switch", "bits of diffusers"], rows
    )


def attacks(_: str) -> str:
    """How long others wait while the server is attacked."""

    def change(found: dict[str, Any], prefix: str) -> str:
        quiet, attacked = (found[f"{prefix}{when}_ms"][1] for when in ("quiet", "attacked"))
        return f"{quiet:.0f} to {attacked:.0f} ms (x {attacked / quiet:.1f})"

    rows = []
    for row in read("attacks")["rows"]:
        cells = [change(row[what], prefix) for what in ("/live", "edit") for prefix in ("", "elsewhere_")]
        rows.append([row["attack"], f"{row['/live']['attacks_per_s']:.0f}", *cells])
    head = ["eight attackers", "times a second", "`/live`", "a server at rest", "an edit", "a server at rest"]
    return markdown_table(head, rows)


def recipes(_: str = "") -> str:
    """What a denoiser takes with all weights on the GPU, and with every block streamed."""
    found = read("gpu_offload")
    rows = []
    for name in ("flux", "flux2", "qwen", "sd35", "wan", "hunyuan"):
        model = found[name]
        resident, least = model["resident"], model["least"]
        ratio = least["ms"] / resident["ms"]
        rows.append([model["title"], f"{model['weights_gib']:.1f} GiB", time_and_peak(resident),
                     f"{time_and_peak(least)} ({ratio:.2f} x the time)"])  # fmt: skip
    return markdown_table(["model", "weights of the denoiser", "resident", "least"], rows)


if __name__ == "__main__":
    text = README.read_text(encoding="utf-8")
    marks = r"(<!-- headlines:.*?-->\n).*(<!-- end of headlines -->)"
    README.write_text(
        re.sub(marks, lambda found: f"{found[1]}{headlines()}\n{found[2]}", text, flags=re.DOTALL), encoding="utf-8"
    )
