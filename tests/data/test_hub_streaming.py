"""Streaming over HTTP, from a hub on this machine, gives the same documents as a mirror."""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import hub_server
import pytest
from each import slow_but
from layouts import EXPECTED, LAYOUTS, choice

pytestmark = pytest.mark.integration


def stream(tmp_path: Path, name: str, *calls) -> list[dict]:
    """Return what each (data, part, row) gives, in a process that knows no other hub."""
    LAYOUTS[name](tmp_path / "hub")
    environment = os.environ | {
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_DISABLE_XET": "1",
    }
    asked = json.dumps([(asdict(data), part, row) for data, part, row in calls])
    words = [sys.executable, hub_server.__file__, str(tmp_path / "hub"), choice(name).name, asked]
    ended = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", slow_but(["slimpajama"], LAYOUTS))
def test_what_is_streamed_is_what_a_mirror_gives(tmp_path, name):
    whole, rest = stream(tmp_path, name, (choice(name), 0, 0), (choice(name), 1, 3))
    assert whole["found"] == EXPECTED[name]
    assert rest["found"] == EXPECTED[name][8:]
    files = [request for request in whole["asked"] if ".parquet" in request or ".jsonl" in request]
    later = [request for request in rest["asked"] if ".parquet" in request or ".jsonl" in request]
    assert len(later) == len(files) - 1  # the first file is not requested again


@pytest.mark.slow
def test_a_revision_that_is_not_known_is_refused(tmp_path):
    data = choice("starcoder", revision="v9")
    known, unknown = stream(
        tmp_path, "starcoder", (choice("starcoder", revision=hub_server.COMMIT), 0, 0), (data, 0, 0)
    )
    assert known["found"] == EXPECTED["starcoder"]
    assert unknown["found"].startswith(f"data.name: cannot load {data.name!r} on the Hugging Face hub")
    assert "revision 'v9'" in unknown["found"]
