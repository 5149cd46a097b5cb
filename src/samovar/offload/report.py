"""How is a plan shown to people? As a table."""

from __future__ import annotations

from .planner import ComponentPlan, OffloadPlan
from .sizes import format_bytes


def table(plan: OffloadPlan) -> str:
    """One line for each component, and what is expected of the whole."""
    rows = [("component", "class", "weights", "on the device", "how"), *map(_row, plan.components)]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*lines, "", _summary(plan), *(f"Note: {note}." for note in plan.notes)])


def _row(component: ComponentPlan) -> tuple[str, str, str, str, str]:
    weights, device = format_bytes(component.num_bytes), format_bytes(component.device_bytes)
    return component.name, component.class_name, weights, device, _how(component)


def _how(component: ComponentPlan) -> str:
    if component.placement == "resident":
        return "stays"
    if component.placement == "turns":
        return "comes in when it is called"
    ring = f"through a ring of {format_bytes(component.ring_bytes)}"
    return f"{len(component.streamed)} of {component.num_blocks} blocks stream {ring}"


def _summary(plan: OffloadPlan) -> str:
    budget = f" of {format_bytes(plan.budget_bytes)}" if plan.budget_bytes is not None else ""
    parts = [f"Expected peak: {format_bytes(plan.peak_bytes)}{budget}"]
    streamed = sum(component.streamed_bytes for component in plan.components if component.role == "denoiser")
    if not plan.offloads_anything:
        parts.append("everything fits, nothing is offloaded")
    if streamed:
        bus_s = streamed / plan.bus_bytes_s
        parts.append(
            f"{format_bytes(streamed)} cross the bus in a forward: {bus_s:.3f} s at {format_bytes(plan.bus_bytes_s)}/s"
        )
    if plan.slow_down is not None:
        parts.append(f"a forward takes {plan.slow_down:.2f} times as long as with everything on the device")
    if streamed and plan.skipped:
        average = format_bytes(round(streamed * (1 - plan.skipped)))
        parts.append(f"{plan.skipped:.0%} of the forwards are skipped and load nothing: {average} for a step")
    return "; ".join(parts) + "."
