"""Stands between a learner and an engine of any kind, and strikes when a request comes to a point."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit


class FaultProxy:
    """Passes on every request; at `url` it looks like the engine at `target`.

    Points: `PATH` (a request is there and not passed on), `PATH done` (answered, the answer not passed on), `bucket N`
    (the N-th bucket of an update is announced, and not passed on).
    """

    def __init__(self, target: str) -> None:
        self.lead_to(target)
        self._strikes: dict[str, Callable[[], None]] = {}
        self._buckets = 0
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                proxy.pass_on(self)

            do_POST = do_GET

            def log_message(self, *_: object) -> None:
                """Nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, name="fault-proxy", daemon=True).start()

    def lead_to(self, target: str) -> None:
        """Look like the engine at `target` from now on."""
        self._target = urlsplit(target).netloc

    def arm(self, point: str, strike: Callable[[], None]) -> None:
        """Call `strike` once, when a request next comes to a point."""
        self._strikes[point] = strike

    @property
    def is_armed(self) -> bool:
        """Whether a strike is still to come."""
        return bool(self._strikes)

    def close(self) -> None:
        """Answer nobody any more."""
        self._server.shutdown()
        self._server.server_close()

    def pass_on(self, handler: BaseHTTPRequestHandler) -> None:
        if handler.path == "/begin_weight_update":
            self._buckets = 0
        if handler.path == "/update_weights_from_distributed":
            self._buckets += 1
            self._reach(f"bucket {self._buckets}")
        self._reach(handler.path)
        body = handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
        kept = {name: handler.headers[name] for name in ("Authorization", "Content-Type") if name in handler.headers}
        connection = http.client.HTTPConnection(self._target)
        try:
            connection.request(handler.command, handler.path, body, kept)
            answer = connection.getresponse()
            content = answer.read()
            self._reach(f"{handler.path} done")
            handler.send_response(answer.status)
            handler.send_header("Content-Type", answer.getheader("Content-Type", "text/plain"))
            handler.send_header("Content-Length", str(len(content)))
            handler.end_headers()
            handler.wfile.write(content)
        except (OSError, http.client.HTTPException):
            pass  # where one end is gone, the other sees its connection closed
        finally:
            connection.close()

    def _reach(self, point: str) -> None:
        strike = self._strikes.pop(point, None)
        if strike is not None:
            strike()
