"""A server whose stamps are the truth that a load client is checked against: the standard library alone, no imports
of ours, so that it is there in a few hundredths of a second.

    python -I -S stamping_server.py NUM_STREAMS NUM_CHUNKS GAP_S

It prints its port, takes one request on each of NUM_STREAMS connections and answers them all in turns, a chunk each
GAP_S. A chunk holds the time on `time.perf_counter` right before it was sent. It ends when all are answered, or when
nobody comes.
"""

from __future__ import annotations

import socket
import sys
import time

TIMEOUT_S = 10.0
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def main(num_streams: int, num_chunks: int, gap_s: float) -> None:
    """Answers once."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(TIMEOUT_S)
        sys.stdout.write(f"{listener.getsockname()[1]}\n")
        sys.stdout.flush()
        peers = [listener.accept()[0] for _ in range(num_streams)]
        for peer in peers:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _take_request(peer)
            peer.sendall(HEAD)
        for _ in range(num_chunks):
            for peer in peers:
                time.sleep(gap_s)
                stamp = b"data: %.9f\n\n"
                text = stamp % time.perf_counter()
                peer.sendall(b"%x\r\n%b\r\n" % (len(text), text))
        for peer in peers:
            peer.sendall(b"0\r\n\r\n")
            peer.close()


def _take_request(peer: socket.socket) -> None:
    peer.settimeout(TIMEOUT_S)
    data = b""
    while b"\r\n\r\n" not in data:
        part = peer.recv(65536)
        if not part:
            return
        data += part


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
