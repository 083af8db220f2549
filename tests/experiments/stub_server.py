"""A server to be measured that computes nothing: options set its answers and how long they take.

python stub_server.py --port 8080 --ms 5 --fail-every 10
"""

import argparse
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count

METRICS = """# HELP llmcache_requests_total Inputs answered.
llmcache_requests_total{{model_name="m",rung="exact"}} {:.1f}
llmcache_requests_total{{model_name="m",rung="computed"}} 0.0
llmcache_num_requests_waiting{{model_name="m"}} 3.0
"""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    options: argparse.Namespace
    counter, lock = count(1), threading.Lock()
    n_answered = 0

    def do_GET(self) -> None:
        has_metrics = self.path == "/metrics" and not self.options.silent
        self._send(200 if has_metrics or self.path == "/health" else 404, METRICS.format(Handler.n_answered))

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.options.fail_every and next(Handler.counter) % self.options.fail_every == 0:
            self._send(503, '{"error": "on purpose"}')
            return
        with self.lock:
            time.sleep(self.options.ms / 1e3)
        Handler.n_answered += 1
        if asked.get("stream"):
            self._stream(asked["max_tokens"])
            return
        if self.options.reply:
            self._send(200, self.options.reply)
            return
        one = [{"label": self.options.label, "score": 0.9}, {"label": "other", "score": 0.1}]
        self._send(200, json.dumps(one if isinstance(asked["inputs"], str) else [one] * len(asked["inputs"])))

    def _stream(self, n_tokens: int) -> None:
        """Send each token as a piece of text, 5 ms after the one before, then how many there were."""
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        told = {"prompt_tokens": 7, "completion_tokens": n_tokens, "prompt_tokens_details": {"cached_tokens": 2}}
        pieces = [{"choices": [{"delta": {"content": "a"}}]}] * n_tokens
        for piece in (*pieces, {"choices": [], "usage": told}):
            time.sleep(0.005)
            data = f"data: {json.dumps(piece)}\n\n".encode()
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

    def _send(self, status: int, body: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Cache-Rung", self.options.rung)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *args: object) -> None:
        """Log nothing."""


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--ms", type=float, default=0.0, help="of an answer, one after another")
    parser.add_argument("--fail-every", type=int, default=0)
    parser.add_argument("--label", default="some")
    parser.add_argument("--reply", help="in place of labels")
    parser.add_argument("--rung", default="none")
    parser.add_argument("--silent", action="store_true", help="tell no metrics")
    Handler.options = parser.parse_args()
    ThreadingHTTPServer.request_queue_size = 256
    ThreadingHTTPServer(("127.0.0.1", Handler.options.port), Handler).serve_forever()
