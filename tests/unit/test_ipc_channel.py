"""Deferred messages of an IPC channel, and the message with which they are sent."""

from __future__ import annotations

import asyncio
import socket

from gpuserve.front.ingress.channel_messages import AnnounceShutdown, LeasesClosed
from gpuserve.front.ingress.ipc_channel import IpcChannel


async def is_sent_at_once(*, with_another: bool) -> bool:
    """Return whether a deferred message is sent in the loop iteration that posts the message."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.setblocking(False)
    end = IpcChannel(ours, lambda message, fds: None, lambda: None)
    end.open()
    end.call_at_next(lambda: end.post(LeasesClosed((1,))))
    if with_another:
        end.post(AnnounceShutdown(1))
    await asyncio.sleep(0)
    with theirs:
        try:
            at_once = bool(theirs.recv(1))
        except BlockingIOError:
            at_once = False
            assert await asyncio.wait_for(asyncio.get_running_loop().sock_recv(theirs, 1), 5)
        end.close()
    return at_once


def test_a_deferred_message_is_sent_with_the_next_message() -> None:
    assert asyncio.run(is_sent_at_once(with_another=True))


def test_a_deferred_message_is_sent_soon_without_another() -> None:
    assert not asyncio.run(is_sent_at_once(with_another=False))
