"""What waits at an end of a passage, and with what it leaves."""

from __future__ import annotations

import asyncio
import socket

from gpuserve.front.ingress.channel_messages import AnnounceShutdown, LeasesClosed
from gpuserve.front.ingress.ipc_channel import IpcChannel


async def leaves_in_this_turn(*, with_another: bool) -> bool:
    """Whether what is of no hurry leaves in the turn in which it is known. Later it does anyway."""
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


def test_what_is_of_no_hurry_leaves_with_the_next_message() -> None:
    assert asyncio.run(leaves_in_this_turn(with_another=True))


def test_what_is_of_no_hurry_leaves_soon_where_nothing_else_is_said() -> None:
    assert not asyncio.run(leaves_in_this_turn(with_another=False))
