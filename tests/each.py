"""Run many cases in one test, for cases of milliseconds, where pytest's own work would take longer than the test."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest

FAILURES = (Exception, pytest.fail.Exception)  # pytest.raises fails with something that is no Exception


def each(names: str | tuple[str, ...], rows: Iterable[Any], ids: Any = None) -> Callable[[Any], Any]:
    """Parametrise like pytest.mark.parametrize, but run all rows in one test, and all combinations if used twice.

    All cases run, whichever fail. The error is that of the first, and names all. Cases share their fixtures, so a test
    that changes a fixture has to be parametrised.
    """
    axis = [part.strip() for part in names.split(",")] if isinstance(names, str) else list(names)
    values = [tuple(row) if len(axis) > 1 or isinstance(names, tuple) else (row,) for row in rows]
    if ids is None or callable(ids):
        told = ids or str
        ids = [", ".join(f"{n}={told(v)!s:.80}" for n, v in zip(axis, row, strict=True)) for row in values]
    cases = [(label, dict(zip(axis, row, strict=True))) for label, row in zip(ids, values, strict=True)]

    def decorate(test: Any) -> Any:
        one, axes = getattr(test, "looped", (test, []))
        axes = [*axes, cases]
        signature = inspect.signature(one)
        looped = {name for labelled in axes for name in labelled[0][1]}

        @functools.wraps(test)
        def all_cases(**fixtures: Any) -> None:
            run_all(one, itertools.product(*axes), fixtures)

        all_cases.looped = one, axes  # type: ignore[attr-defined]
        kept = [parameter for name, parameter in signature.parameters.items() if name not in looped]
        all_cases.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        return all_cases

    return decorate


def run_all(test: Callable[..., None], cases: Iterable[Any], fixtures: Mapping[str, Any]) -> None:
    failed: list[tuple[str, BaseException]] = []
    skipped, ran = None, 0
    for case in cases:
        try:
            test(**{name: value for _, row in case for name, value in row.items()}, **fixtures)
        except FAILURES as error:
            failed.append((", ".join(str(label) for label, _ in case), error))
        except pytest.skip.Exception as reason:
            skipped = reason
            continue
        ran += 1
    if failed:
        error = failed[0][1]
        error.add_note(f"{len(failed)} of {ran} cases fail, and the error is the first one's:")
        for name, _ in failed[:20]:
            error.add_note(f"  {name}")
        raise error
    if skipped and not ran:
        raise skipped


def slow_but(kept: Iterable[Any], values: Iterable[Any]) -> list[Any]:
    """Return rows of pytest.mark.parametrize, all marked slow except those that represent the others in make test.

    A tuple is a row of several parameters.
    """
    values, kept = list(values), list(kept)
    assert all(value in values for value in kept), kept
    rows = [(value if isinstance(value, tuple) else (value,), value in kept) for value in values]
    return [pytest.param(*row, marks=[] if is_kept else pytest.mark.slow) for row, is_kept in rows]
