"""A TCP proxy that delays a server's replies: a busy machine, the same in every run."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def slow_proxy(port: int, delay_s: float) -> Iterator[int]:
    """Within: a port that forwards to `port`, and delays each piece of a reply by `delay_s`."""
    listening = socket.create_server(("127.0.0.1", 0))
    ends: list[socket.socket] = [listening]

    def pump(source: socket.socket, target: socket.socket, wait_s: float) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 20):
                time.sleep(wait_s)
                target.sendall(data)
        for one in (source, target):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def accept() -> None:
        with suppress(OSError):
            while True:
                client, _ = listening.accept()
                server = socket.create_connection(("127.0.0.1", port))
                ends.extend((client, server))
                for task in ((client, server, 0.0), (server, client, delay_s)):
                    threading.Thread(target=pump, args=task, daemon=True).start()

    acceptor = threading.Thread(target=accept, daemon=True)
    acceptor.start()
    try:
        yield listening.getsockname()[1]
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        acceptor.join()
        for one in ends:
            one.close()
