"""The text that refuses a launch: each error once, with the jobs that have it."""

from __future__ import annotations

STALE = "stale: "  # the beginning of a refusal of a run of other code; many jobs of a sweep may share it


def refusal(errors: dict[str, list[str]], total: int) -> str:
    """Return the errors as text, each with the names and the number of its jobs.

    An error that all jobs share stands alone; if it says that several runs are stale, their number stands above it.
    """
    if list(map(len, errors.values())) == [total] and not (total > 1 and next(iter(errors)).startswith(STALE)):
        return next(iter(errors))
    lines = [f"{sum(map(len, errors.values()))} of {total} jobs cannot run, so none was started:"]
    for message, names in errors.items():
        if len(names) == 1:
            lines.append(f"  {message if message.startswith(names[0]) else f'{names[0]}: {message}'}")
        else:
            lines += [f"  {len(names)} of {total} jobs: {message}"]
            lines += [f"    {name}" for name in names if len(names) < total]
    return "\n".join(lines)
