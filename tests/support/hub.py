"""A server on this machine that answers the Hugging Face hub's client as the hub does, for one model."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

COMMIT = "0123456789" * 4
REFUSAL = "\x1b[2J no such model"
"""A message that would clear a terminal."""


@contextmanager
def serve_model(name: str, folder: Path) -> Iterator[str]:
    """Serve the files of a folder as the model with this id; yield the address, for HF_ENDPOINT."""
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    etags = {path: hashlib.sha256(content).hexdigest() for path, content in files.items()}
    tree = [{"type": "file", "path": path, "size": len(files[path]), "oid": etags[path]} for path in files]
    info = {"id": name, "sha": COMMIT, "siblings": [{"rfilename": path} for path in files]}
    api = {f"/api/models/{name}/revision/main": info, f"/api/models/{name}/tree/{COMMIT}": tree}

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            where = self.path.partition("?")[0]
            path = where.removeprefix(f"/{name}/resolve/{COMMIT}/")
            found = json.dumps(api[where]).encode() if where in api else files.get(path)
            self.send_response(200 if found is not None else 404)
            if found is None:
                self.send_header("X-Error-Code", "RepoNotFound")
                found = json.dumps({"error": REFUSAL}).encode()
            self.send_header("Content-Length", str(len(found)))
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", f'"{etags.get(path, where)}"')
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(found)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
