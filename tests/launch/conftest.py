from __future__ import annotations

import pytest
from fake_study import FakeStudy

from mxstudy.studies import STUDIES
from mxstudy.studies.checks import CHECKS


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> FakeStudy:
    fake = FakeStudy()
    for known in (CHECKS, STUDIES):
        monkeypatch.setitem(known, "pretrain", fake)
    return fake
