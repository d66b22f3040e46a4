"""A server with an OpenAI-compatible API, which also misbehaves."""

import contextlib
import http.server
import json
import threading

import pytest

from verl_fn.rewards import judge


class Server:
    """Answers as ``reply(body)`` says: a string, a status with a body, or None to hang until it is closed."""

    def __init__(self):
        self.reply, self.seen, self.headers, self.closing = self.grade, [], [], threading.Event()
        self.at_once = self.most_at_once = 0
        self.lock, outer = threading.Lock(), self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer.lock:
                    outer.seen.append(body["messages"][0]["content"] if "messages" in body else body["input"])
                    outer.headers.append(dict(self.headers) | {"path": self.path})
                    outer.at_once += 1
                    outer.most_at_once = max(outer.most_at_once, outer.at_once)
                try:
                    outer.answer(self, outer.reply(body))
                finally:
                    with outer.lock:
                        outer.at_once -= 1

            def log_message(self, *args):
                pass

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"

    def answer(self, handler, reply):
        if reply is None:
            self.closing.wait(20)
            return
        status, text = reply if isinstance(reply, tuple) else (200, completion(reply))
        handler.send_response(status)
        handler.end_headers()
        if callable(text):
            text(handler.wfile)
        else:
            handler.wfile.write(text.encode())

    @staticmethod
    def grade(body):
        """The length of the response."""
        return f"Well.\nScore: {len(body['messages'][0]['content'].partition('R=')[2])}"

    def close(self):
        self.closing.set()
        self.http.shutdown()
        self.http.server_close()


def completion(content):
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": content}}]})


@contextlib.contextmanager
def serving():
    """A server that no proxy hides, for a judge that waits hardly between its attempts."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            patch.delenv(name, raising=False)
        patch.setattr(judge, "FIRST_PAUSE", 0.01)
        server = Server()
        yield server
        server.close()
