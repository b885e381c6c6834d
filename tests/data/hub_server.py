"""Serve a Hugging Face hub of one data set and one commit from a folder, or, as a program, use it.

python hub_server.py FOLDER NAME CALLS reads from each of the places in CALLS, JSON of lists [data, part, row]. It
prints JSON of what each read gave, a text or the refusal, and of what was asked of the server meanwhile.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REVISIONS = ("main", COMMIT)
LINE = "GET {} {}"


class Hub(BaseHTTPRequestHandler):
    """Answers `datasets` and `huggingface_hub`: the commit of a revision, folders, files or ranges of them."""

    protocol_version = "HTTP/1.1"
    root: Path
    name: str
    asked: list[str]

    def do_GET(self) -> None:
        path = unquote(self.path.partition("?")[0])
        self.asked.append(LINE.format(path.rpartition("/")[2], self.headers.get("Range")))
        for pattern, answer in (
            (f"/api/datasets/{self.name}/revision/(?P<revision>.+)", self.commit),
            (f"/api/datasets/{self.name}/tree/{COMMIT}/?(?P<under>.*)", self.tree),
            (f"/datasets/{self.name}/resolve/[^/]+/(?P<file>.+)", self.content),
        ):
            found = re.fullmatch(pattern, path)
            if found:
                return answer(*found.groups())
        return self.missing("RepoNotFound")

    do_HEAD = do_GET

    def commit(self, revision: str) -> None:
        if revision not in REVISIONS:
            return self.missing("RevisionNotFound")
        files = [{"rfilename": path.relative_to(self.root).as_posix()} for path in self.root.rglob("*")]
        return self.say(json.dumps({"id": self.name, "sha": COMMIT, "siblings": files}).encode())

    def tree(self, under: str) -> None:
        folder = self.root / under
        if not folder.is_dir():
            return self.missing("EntryNotFound")
        paths = sorted(folder.rglob("*") if "recursive=true" in self.path.lower() else folder.iterdir())
        return self.say(json.dumps([self.entry(path) for path in paths]).encode())

    def entry(self, path: Path) -> dict[str, Any]:
        kind = "directory" if path.is_dir() else "file"
        size = path.stat().st_size
        return {"type": kind, "path": path.relative_to(self.root).as_posix(), "size": size, "oid": "0" * 40}

    def content(self, file: str) -> None:
        if not (self.root / file).is_file():
            return self.missing("EntryNotFound")
        content = (self.root / file).read_bytes()
        about = {"X-Repo-Commit": COMMIT, "ETag": '"0"', "Accept-Ranges": "bytes"}
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if not asked:
            return self.say(content, **about)
        start, stop = int(asked[1]), min(int(asked[2] or len(content)), len(content) - 1) + 1
        part = {"Content-Range": f"bytes {start}-{stop - 1}/{len(content)}"}
        return self.say(content[start:stop], 206, **about, **part)

    def missing(self, code: str) -> None:
        self.say(b"{}", 404, **{"X-Error-Code": code})

    def say(self, body: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        """Write nothing to the terminal."""


def main() -> None:
    folder, name, calls = sys.argv[1:]
    asked: list[str] = []
    handler = type("Served", (Hub,), {"root": Path(folder), "name": name, "asked": asked})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    os.environ["HF_ENDPOINT"] = f"http://127.0.0.1:{server.server_port}"  # read when the libraries are imported

    from mxstudy import config
    from mxstudy.data import corpus
    from mxstudy.reader import ConfigError

    given = []
    for values, part, row in json.loads(calls):
        try:
            source = corpus.source_of(config.HuggingFace(**values))
            rows = corpus.read_from(source, corpus.SourceLocation(part, row, 0))
            found: Any = [text for _, text in rows if text]
        except ConfigError as error:
            found = str(error)
        given.append({"found": found, "asked": asked.copy()})
        asked.clear()
    print(json.dumps(given))


if __name__ == "__main__":
    main()
