"""Run a real `mlflow server` that can be killed and restarted, and send plain HTTP requests to it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import psutil

from mxstudy.launch.local import free_port

ENVIRONMENT = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}  # otherwise eight more processes start, unused here


class Server:
    """A server on a free port of 127.0.0.1 with the database of that URI."""

    def __init__(self, folder: Path, database: str, workers: int = 1) -> None:
        self.folder, self.database, self.workers = folder, database, workers
        self.process: subprocess.Popen[bytes] | None = None
        self.cpu_s = 0.0  # CPU time of the processes that were killed
        self.port = free_port()
        self.uri = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    def start(self) -> None:
        """Start the server and wait for all workers. Raises RuntimeError, with the server's log, after 90 s."""
        options = ["--backend-store-uri", self.database, "--workers", str(self.workers)]
        options += ["--artifacts-destination", str(self.folder / "artifacts"), "--port", str(self.port)]
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", *options]
        log, environment = self.folder / "server.log", os.environ | ENVIRONMENT
        with log.open("w") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=output, start_new_session=True, env=environment
            )
        deadline_s = time.time() + 90
        while log.read_text().count("Application startup complete") < self.workers:
            if time.time() > deadline_s:
                raise RuntimeError(log.read_text())
            time.sleep(0.2)

    def kill(self) -> None:
        if self.process is not None:
            with suppress(ProcessLookupError, psutil.NoSuchProcess):
                parent = psutil.Process(self.process.pid)
                times = [process.cpu_times() for process in (parent, *parent.children(recursive=True))]
                self.cpu_s += sum(each.user + each.system for each in times)
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None

    def get(self, path: str) -> bytes:
        with urllib.request.urlopen(f"{self.uri}/{path}", timeout=20) as answer:
            return answer.read()

    def post(self, path: str, **question: Any) -> Any:
        data, headers = json.dumps(question).encode(), {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.uri}/api/2.0/mlflow/{path}", data, headers)
        with urllib.request.urlopen(request, timeout=20) as answer:
            return json.load(answer)
