"""Which figures does the documentation show? Every table of measured values, made from the results."""

from __future__ import annotations

from typing import Any

from docs.generate.results import markdown_table, read

SCHEDULE, TAYLOR, PLAIN = "samovar schedule", "diffusers TaylorSeer lite", "plain steps"
_TITLES = {"flux": "FLUX.1 12B", "qwen": "Qwen-Image 20B"}


def nearest_row(family: str, computed: float) -> dict[str, Any]:
    """The row of a quality curve whose number of computed steps is nearest."""
    rows = [row for row in read("quality")["rows"] if row["family"] == family]
    return min(rows, key=lambda row: (abs(row["computed"] - computed), row["computed"]))


def headlines(folder: str = "") -> str:
    """The six figures of the README and the home page; `folder` is where results are, seen from the page."""
    place = folder or "benchmarks/results"
    offload, compose = read("gpu_offload"), read("gpu_compose")
    cache = read("gpu_cache")["models"]["flux"]["skipped"]
    flux, peers = offload["flux"], offload["peers"]
    budget = next(point for point in flux["curve"] if point["budget_gib"] == 15.5)
    ours, taylor, plain = (nearest_row(family, 16) for family in (SCHEDULE, TAYLOR, PLAIN))
    slower = budget["ms"] / flux["resident"]["ms"] - 1
    rows = [
        [
            "FLUX.1 12B streamed block by block",
            f"**{flux['least']['peak_gib']:.1f} GiB** instead of {flux['resident']['peak_gib']:.1f}, "
            f"{flux['least']['ms']:.0f} ms a step",
            f"diffusers group offload: {peers['group_ms']:.0f} ms, {peers['group_peak_gib']:.1f} GiB",
            "gpu_offload",
        ],
        [
            "FLUX.1 12B within 15.5 GiB",
            f"**{100 * slower:.1f} % slower** than with all weights on the GPU",
            "same bits as without offload",
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
            "Quality with 16 of 50 steps computed, built-in model",
            f"**{ours['psnr']:.0f} dB** PSNR to the exact images",
            f"TaylorSeer {taylor['psnr']:.0f} dB, 16 plain steps {plain['psnr']:.0f} dB",
            "quality",
        ],
    ]
    table = [[what, us, other, f"[result]({place}/{name}.json)"] for what, us, other, name in rows]
    models = "reference/models.md" if folder else "docs/reference/models.md"
    table.append(
        [
            "diffusers transformer classes that can be cached",
            "**76 of 76**, no code for any model",
            "FirstBlockCache: 15",
            f"[table]({models})",
        ]
    )
    return markdown_table(["", "Samovar", "compared with", ""], table)


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


def combined(_: str) -> str:
    """Time and peak of every combination on a GPU."""
    result = read("gpu_compose")
    rows = []
    for name in result["flux"]["contestants"]:
        found = [result[model]["contestants"][name] for model in _TITLES]
        rows.append([titled(name), *(f"{each['s']:.2f} s, {each['peak_gib']:.1f} GiB" for each in found)])
    rows.sort(key=lambda row: (row[0] != "nothing", row[0].count("+"), row[0]))
    return markdown_table(["20 steps with", *_TITLES.values()], rows)


def titled(name: str) -> str:
    """A combination as readers know it: results name offload by its mode alone."""
    return name.replace("layerwise", "layerwise offload").replace("model", "model offload")


def offload(_: str) -> str:
    """Budgets of FLUX.1 and what came of them."""
    rows = [
        [
            f"{point['budget_gib']:g} GiB",
            f"{point['peak_gib']:.2f} GiB",
            f"{point['streamed_blocks']} of 57",
            f"{point['ms']:.0f} ms",
            f"{point['planned_ms']:.0f} ms",
            f"{point['over_limit']:.1%}",
        ]
        for point in read("gpu_offload")["flux"]["curve"]
    ]
    head = ["budget", "measured peak", "blocks that stream", "forward", "planned", "above what bus and compute allow"]
    return markdown_table(head, rows)


def offload_peers(_: str) -> str:
    """The same task by diffusers and accelerate."""
    result = read("gpu_offload")
    flux, peers = result["flux"], result["peers"]
    rows = [
        [
            "least memory, one forward",
            f"{flux['least']['ms']:.0f} ms, {flux['least']['peak_gib']:.2f} GiB",
            f"diffusers group offload: {peers['group_ms']:.0f} ms, {peers['group_peak_gib']:.2f} GiB",
        ],
        [
            "a step that the cache skips",
            f"{flux['skip']['skip_ms']:.1f} ms, {flux['skip']['skip_moved_bytes']} bytes moved",
            f"diffusers with FirstBlockCache: {peers['group_skip_ms']:.0f} ms",
        ],
        [
            "all weights in, and out again",
            f"{flux['swap']['in_s']:.2f} s, {flux['swap']['out_s'] * 1000:.0f} ms",
            f"accelerate: {peers['accelerate_in_s']:.1f} s, {peers['accelerate_out_s']:.0f} s",
        ],
        ["set-up", f"{flux['setup_s']:.1f} s", f"diffusers: {peers['group_setup_s']:.0f} s"],
        [
            "host memory, times the weights",
            f"{flux['host_gib_after'] / flux['weights_gib']:.2f}",
            f"diffusers: {peers['group_host_gib'] / flux['weights_gib']:.2f}",
        ],
    ]
    return markdown_table(["FLUX.1 12B", "Samovar", "peer"], rows)


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
