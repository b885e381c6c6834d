"""A real `mlflow server`, and what it says over plain HTTP."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest


class Server:
    """A real `mlflow server` on a free port of 127.0.0.1, to be killed and started again."""

    def __init__(self, folder: Path, empty_store: Path) -> None:
        self.folder, self.process = folder, None
        shutil.copy(empty_store, folder / "server.db")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        options = ["--backend-store-uri", f"sqlite:///{self.folder / 'server.db'}", "--workers", "1"]
        options += ["--artifacts-destination", str(self.folder / "artifacts"), "--port", str(self.port)]
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", *options]
        with (self.folder / "server.log").open("a") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
        deadline_s = time.time() + 90
        while time.time() < deadline_s:
            with suppress(OSError), urllib.request.urlopen(f"{self.uri}/health", timeout=1):
                return
            time.sleep(0.2)
        pytest.fail((self.folder / "server.log").read_text())

    def kill(self) -> None:
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def get(self, path: str) -> bytes:
        with urllib.request.urlopen(f"{self.uri}/{path}", timeout=20) as answer:
            return answer.read()

    def post(self, path: str, **question: Any) -> Any:
        data, headers = json.dumps(question).encode(), {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.uri}/api/2.0/mlflow/{path}", data, headers)
        with urllib.request.urlopen(request, timeout=20) as answer:
            return json.load(answer)
