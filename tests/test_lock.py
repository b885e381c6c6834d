"""requirements.lock has the tested environment, within the ranges of pyproject.toml."""

from __future__ import annotations

import re

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from test_scripts import PROJECT, ROOT

LOCKED = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "requirements.lock").read_text(), re.MULTILINE))
EXTRAS = PROJECT["optional-dependencies"]
ASKED = [Requirement(line) for line in (*PROJECT["dependencies"], *EXTRAS["dev"], *EXTRAS["docs"])]
TESTED = re.search(r"^TESTED := torch==(\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_the_lock_has_every_requirement_in_its_range() -> None:
    assert len(ASKED) > 20
    locked = [(asked, LOCKED.get(canonicalize_name(asked.name))) for asked in ASKED]
    lacking = [str(asked) for asked, found in locked if found is None or found not in asked.specifier]
    assert not lacking, "run make lock"


def test_the_lock_is_of_the_torch_that_make_installs() -> None:
    assert TESTED
    assert LOCKED["torch"] == TESTED[1]
    assert not [name for name in LOCKED if name.startswith("nvidia")], "the tested torch is the one for CPUs"
