"""A small HTTP server that responds as SGLang does, until a test makes it fail."""

import itertools
import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from megappo.engines.client import EngineClient

HANG_SECONDS = 0.6
LINE_SEPARATOR = "\u2028"
"""In a text; some programs end lines there."""


def response(tokens: list[int], log_probs: list[float], reason: str = "stop", **more: Any) -> dict[str, Any]:
    """Return SGLang's response for one sequence; `more` are further fields of its finish reason."""
    entries = [[value, token, None] for value, token in zip(log_probs, tokens, strict=True)]
    end = {"finish_reason": {"type": reason, **more}, "completion_tokens": len(tokens)}
    return {"output_ids": tokens, "meta_info": end | {"output_token_logprobs": entries}, "text": LINE_SEPARATOR}


WELL = response([5, 6], [-1.0, -2.0])
NONSENSE: dict[str, Callable[[int], Any]] = {
    "no list": lambda count: {"text": "hello"},
    "too few": lambda count: [WELL] * (count - 1),
    "other tokens": lambda count: [WELL | {"output_ids": [7, 8]}] * count,
    "no numbers": lambda count: [response([5], [float("nan")])] * count,
    "aborted": lambda count: [response([5], [-1.0], "abort")] * count,
    "cut": lambda count: [WELL | {"output_ids": [6]}] * count,
    "refused": lambda count: [response([5], [-1.0], "abort", status_code=400)] * count,
    "no log-probs": lambda count: [WELL | {"meta_info": {"finish_reason": {"type": "stop"}, "completion_tokens": 2}}],
}
"""Replies to a request for `count` sequences."""
LATE: dict[str, list[Any]] = {
    "late refusal": [{"error": {"message": "why", "code": 400}}],
    "late error": [{"error": {"message": "why", "code": 500}}],
    "other error": [{"error": "why"}],
    "twice": [WELL | {"index": 0}],
    "unasked": [WELL | {"index": 99}],
    "null": [None],
    "break": [],
}
"""Chunks of a stream after its first response."""


def _well(count: int) -> list[dict[str, Any]]:
    return [WELL] * count


def _events(replies: Any) -> list[Any]:
    """Return the events of a stream: all sequences begin, then all end."""
    if not isinstance(replies, list):
        return [replies]
    begun = [WELL | {"index": i, "meta_info": {"finish_reason": None}} for i in range(len(replies))]
    return begun + [reply | {"index": i} for i, reply in enumerate(replies)]


class EngineServer(ThreadingHTTPServer):
    """The server; as a context manager, it serves inside the block.

    Attributes:
        failure: failure of every request after the first `num_well`: a key of NONSENSE or LATE, or "no JSON", "crash",
            "hang" (of the scheduler; "deaf": of the HTTP server, too), "refusal", "error", "in vain".
        before: called before each response.
        arguments: further ServerArgs that it reports.
    """

    daemon_threads = True

    def __init__(self, failure: str = "", num_well: int = 0):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.failure = failure
        self.num_well = num_well
        self.arguments: dict[str, Any] = {}
        self.before: Callable[[], object] = lambda: None
        self.requests = itertools.count()
        self.ended = threading.Event()

    def __enter__(self) -> "EngineServer":
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.ended.set()
        self.shutdown()
        self.server_close()

    def handle_error(self, *args: object) -> None:
        """Ignore errors of clients that have disconnected."""

    def client(self) -> EngineClient:
        return EngineClient(f"http://127.0.0.1:{self.server_port}", "key", 20.0, hang_seconds=HANG_SECONDS)


class _Handler(BaseHTTPRequestHandler):
    server: EngineServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.server.failure == "deaf":
            self.server.ended.wait()
        info = {"tp_size": 2, "watchdog_timeout": 7, **self.server.arguments}
        self._answer(503 if self.server.failure == "hang" else 200, json.dumps(info).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        count = len(body.get("input_ids", []))
        self.server.before()
        failure = self.server.failure if next(self.server.requests) >= self.server.num_well else ""
        if failure in ("hang", "deaf"):
            self.server.ended.wait()
        elif failure == "crash":
            self.close_connection = True
        elif failure in ("refusal", "error"):
            self._answer(400 if failure == "refusal" else 500, b'{"error": "why"}')
        elif failure == "in vain":
            self._answer(400, b'{"success": false, "message": "why"}')
        elif failure == "no JSON":
            self._answer(200, b"data: <html>\n\n" if body.get("stream") else b"<html>")
        elif failure in LATE:
            self._stream(_events(_well(count))[: count + 1] + LATE[failure], breaks=failure == "break")
        elif body.get("stream"):
            self._stream(_events(NONSENSE.get(failure, _well)(count)))
        else:
            self._answer(200, json.dumps(NONSENSE.get(failure, _well)(count)).encode())

    def _stream(self, events: list[Any], *, breaks: bool = False) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for line in [json.dumps(event, ensure_ascii=False) for event in events] + ["[DONE]"] * (not breaks):
            for part in (b"data: ", f"{line}\n\n".encode()):
                self.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
        self.close_connection = breaks
        if not breaks:
            self.wfile.write(b"0\r\n\r\n")

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Log nothing."""
