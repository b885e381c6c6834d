"""Every experiment and every job of a sweep has the fingerprint that it had: else finished runs would be trained again.

One that has to change is a change of `mxstudy.config.fingerprint.SCHEMA_VERSION`, or of what the experiment asks for;
new ones are added by `python tests/fingerprints.py`. `tests/test_conf.py` asks the same of what it composes anyway.
"""

from __future__ import annotations

import pytest
from fingerprints import all_recorded, composed, names, recorded


def test_all_are_recorded() -> None:
    assert sorted(all_recorded()) == sorted(names())


@pytest.mark.slow
@pytest.mark.parametrize("name", names())
def test_they_are_as_recorded(name: str) -> None:
    assert composed(name) == recorded(name)
