from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
from fake_study import FakeStudy

from mxstudy.studies import MODULES


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> FakeStudy:
    fake = FakeStudy()
    monkeypatch.setitem(sys.modules, "fake_study_module", SimpleNamespace(STUDY=fake))
    monkeypatch.setitem(MODULES, "pretrain", "fake_study_module")
    return fake
