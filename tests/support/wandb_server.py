"""A stand-in for the server of Weights & Biases: it stores the rows that the real library sends."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_PROJECT = {"id": "UA==", "name": "meanshift", "entity": {"id": "RQ==", "name": "me"}}


class WandBServer(ThreadingHTTPServer):
    """Rows by run id, at the offsets that the library sends with them."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.rows: dict[str, list[dict[str, Any]]] = {}
        self.configs: dict[str, dict[str, Any]] = {}
        self.offsets: list[int] = []

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to log in here."""
        return {
            "WANDB_BASE_URL": f"http://127.0.0.1:{self.server_port}",
            "WANDB_API_KEY": "0123456789" * 4,
            "WANDB_ERROR_REPORTING": "false",
        }

    def answer(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        """The data of a GraphQL request, as far as the library looks at it."""
        name = variables.get("name") or variables.get("run")
        if "upsertBucket" in query:
            if variables.get("config"):
                self.configs[name] = json.loads(variables["config"])
            new = name not in self.rows
            return {"upsertBucket": {"bucket": self.bucket(name), "inserted": new}}
        if "createRunFiles" in query:
            return {"createRunFiles": {"runID": "QnVja2V0", "uploadHeaders": [], "files": []}}
        if "historyTail" in query:
            return {
                "model": {**_PROJECT, "bucket": self.bucket(name) if name in self.rows else None}
            }
        viewer = {"id": "1", "entity": "me", "username": "me", "flags": "{}"}
        return {"viewer": {**viewer, "teams": {"edges": []}}, "serverInfo": {}}

    def bucket(self, name: str) -> dict[str, Any]:
        rows = self.rows.get(name, [])
        return {
            "id": "QnVja2V0",
            "name": name,
            "displayName": name,
            "config": json.dumps(self.configs.get(name, {})),
            "summaryMetrics": json.dumps(rows[-1] if rows else {}),
            "historyLineCount": len(rows),
            "historyTail": json.dumps([json.dumps(row) for row in rows[-1:]]),
            "eventsLineCount": 0,
            "eventsTail": "[]",
            "logLineCount": 0,
            "tags": [],
            "wandbConfig": '{"t": 1}',
            "project": _PROJECT,
        }

    def stream(self, name: str, files: dict[str, Any]) -> None:
        """Store the rows of a request to the file stream."""
        history = files.get("wandb-history.jsonl")
        if history:
            rows = self.rows.setdefault(name, [])
            start = history["offset"]
            content = [json.loads(line) for line in history["content"]]
            rows[start : start + len(content)] = content
            self.offsets.append(start)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: WandBServer

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        request = json.loads(body)
        if self.path == "/graphql":
            answer = self.server.answer(request["query"], request.get("variables") or {})
            self._reply({"data": answer})
        else:
            self.server.stream(self.path.split("/")[-2], request.get("files") or {})
            self._reply({"limits": {}})

    def _reply(self, values: dict[str, Any]) -> None:
        content = json.dumps(values).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


@contextmanager
def serve_wandb() -> Iterator[WandBServer]:
    with WandBServer() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
