from __future__ import annotations

import pytest
from fake_study import FakeStudy

from mxstudy.studies import STUDIES


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> FakeStudy:
    fake = FakeStudy()
    monkeypatch.setitem(STUDIES, "pretrain", fake)
    return fake
