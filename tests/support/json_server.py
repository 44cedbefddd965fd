"""A server on this machine that answers requests with JSON as a test wants, and keeps them."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class JsonServer(ThreadingHTTPServer):
    """Answers as a test wants, and keeps the requests: path, body, authorization.

    Attributes:
        answers: returns status and answer, JSON or a text, of the request with a number, from 1, and a body.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.requests: list[tuple[str, dict, str]] = []
        self.answers = lambda count, body: (200, {})
        self.num_open = self.most_open = 0


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        server, body = self.server, json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server.requests.append((self.path, body, self.headers.get("Authorization", "")))
        server.num_open += 1
        server.most_open = max(server.most_open, server.num_open)
        status, answer = server.answers(len(server.requests), body)
        server.num_open -= 1
        is_text = isinstance(answer, str)
        data = (answer if is_text else json.dumps(answer)).encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain" if is_text else "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving() -> Iterator[JsonServer]:
    """Serve until the end."""
    with JsonServer() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
