"""Threads that wait for messages on one link: the thread that receives does so for all."""

from __future__ import annotations

import queue
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from gpuserve_worker.execution.link_receiver import ReceiveLock

TIMEOUT_S = 20.0


class Mail:
    """Messages, each for one of the threads; at most one thread may receive at a time."""

    def __init__(self) -> None:
        self.turns = ReceiveLock()
        self.sent: queue.Queue[int] = queue.Queue()
        self.came: set[int] = set()
        self.received = 0
        self.receiving = 0

    def receive(self) -> None:
        self.receiving += 1
        assert self.receiving == 1
        number = self.sent.get(timeout=TIMEOUT_S)
        self.came.add(number)
        self.received += 1
        self.receiving -= 1

    def wait_for(self, number: int) -> None:
        self.turns.receive_until(lambda: number in self.came, self.receive)


@pytest.fixture
def mail() -> Mail:
    return Mail()


def test_every_thread_gets_its_own_whoever_receives(mail: Mail) -> None:
    threads, each = 8, 200

    def ask(thread: int) -> None:
        for step in range(each):
            number = thread * each + step
            mail.sent.put(number)
            mail.wait_for(number)

    with ThreadPoolExecutor(threads) as pool:
        for one in [pool.submit(ask, number) for number in range(threads)]:
            one.result(TIMEOUT_S)
    assert mail.came == set(range(threads * each))
    assert mail.received == threads * each
    assert mail.turns.try_acquire()


def test_answers_in_any_order(mail: Mail) -> None:
    with ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(mail.wait_for, number) for number in range(8)]
        for number in (5, 0, 7, 3, 1, 6, 2, 4):
            mail.sent.put(number)
            waiting[number].result(TIMEOUT_S)
            assert number in mail.came
    assert mail.received == 8


def test_who_has_the_turn_lets_those_go_on_for_whom_nothing_is_left_to_receive(mail: Mail) -> None:
    """As the loop does between two batches, and while a callable runs."""
    with ThreadPoolExecutor(1) as pool:
        for number in range(100):
            assert mail.turns.try_acquire()
            asked = threading.Event()

            def wait(number: int = number, asked: threading.Event = asked) -> None:
                asked.set()
                mail.wait_for(number)

            waiting = pool.submit(wait)
            assert asked.wait(TIMEOUT_S)
            mail.came.add(number)
            mail.turns.release()
            waiting.result(TIMEOUT_S)
    assert mail.received == 0


def test_nothing_is_received_for_what_is_there(mail: Mail) -> None:
    mail.came.add(1)
    mail.wait_for(1)
    assert mail.received == 0


def test_a_failure_to_receive_is_the_threads_own_and_the_turn_goes_on(mail: Mail) -> None:
    def fail() -> None:
        raise OSError("gone")

    with ThreadPoolExecutor(1) as pool:
        assert mail.turns.try_acquire()
        other = pool.submit(mail.wait_for, 1)
        mail.turns.release()
        mail.sent.put(2)
        mail.sent.put(1)
        other.result(TIMEOUT_S)
    with pytest.raises(OSError, match="gone"):
        mail.turns.receive_until(lambda: False, fail)
    assert mail.turns.try_acquire()
