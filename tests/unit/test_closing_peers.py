"""Peers that have closed, out of tables like the kernel's and out of the kernel's own."""

from __future__ import annotations

import socket
from pathlib import Path

from processes import wait_until

from gpuserve.front.endpoint.closing_peers import closing_peers

HEADER = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid\n"


def test_only_close_wait_counts(tmp_path: Path) -> None:
    table = tmp_path / "proc/self/net/tcp"
    table.parent.mkdir(parents=True)
    table.write_text(
        HEADER
        + "   0: 0100007F:1F40 0100007F:D431 08 00000000:00000000 00:00000000 00000000     0\n"
        + "   1: 0100007F:1F40 0100007F:D432 01 00000000:00000000 00:00000000 00000000     0\n"
    )
    (table.parent / "tcp6").write_text(
        HEADER + "   0: 0000000000000000FFFF00000100007F:1F40 0000000000000000FFFF00000200A8C0:0050 08 0:0\n"
    )
    assert closing_peers(tmp_path) == {("127.0.0.1", 0xD431, 8000), ("192.168.0.2", 80, 8000)}


def test_nothing_to_read_is_nobody(tmp_path: Path) -> None:
    assert closing_peers(tmp_path) == set()


def test_a_real_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        accepted, peer = listener.accept()
        with accepted:
            connection = (*peer, listener.getsockname()[1])
            assert connection not in closing_peers()
            client.close()
            wait_until(lambda: connection in closing_peers(), "the kernel says so", 2.0)
