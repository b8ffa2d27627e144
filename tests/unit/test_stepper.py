"""The step loop of a stepped callable: requests join, leave, wait and fail between steps."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from exploring import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuserve import Last, Later
from gpuserve_worker.execution.stepper import Stepper, StepRequest


class Job(StepRequest):
    """A request of so many steps."""

    def __init__(self, name: str, length: int = 3, credit: int = 64) -> None:
        super().__init__(credit)
        self.name = name
        self.length = length


class Work:
    """The state of a job."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.done = 0


class Words:
    """A callable with ``room`` jobs at most, and a record of what was called."""

    def __init__(self, room: int = 64, awaits: bool = False) -> None:
        self.room = room
        self.awaits = awaits
        self.held: list[Work] = []
        self.released: Counter[str] = Counter()
        self.steps: list[list[str]] = []
        self.poison: set[str] = set()
        #: What ``step`` returns in place of its results.
        self.wrong: tuple[Any, ...] = ()

    def admit(self, job: Job) -> Any:
        if len(self.held) >= self.room:
            raise Later
        if job.length < 0:
            raise ValueError(job.name)
        work = Work(job)
        self.held.append(work)
        return self._result(work)

    def step(self, active: Sequence[Work]) -> Any:
        self.steps.append([one.job.name for one in active])
        for one in active:
            if one.job.name in self.poison:
                raise ArithmeticError("poison")
        return self.wrong[0] if self.wrong else self._result([self._next(one) for one in active])

    def release(self, work: Work) -> None:
        self.held.remove(work)
        self.released[work.job.name] += 1

    def _next(self, work: Work) -> Any:
        work.done += 1
        word = {"y": work.done}
        return Last(word) if work.done == work.job.length else word

    def _result(self, value: Any) -> Any:
        async def awaited() -> Any:
            await asyncio.sleep(0)
            return value

        return awaited() if self.awaits else value


class Ends:
    """The receiver of results: responses and the end of each job."""

    def __init__(self) -> None:
        self.words: dict[str, list[int]] = {}
        self.ends: dict[str, list[str]] = {}
        self.returned: list[Job] = []
        self.n_logged = 0
        self.unsendable: set[str] = set()

    def request_of(self, entry: Job) -> Any:
        return entry

    def respond(
        self, entries: Sequence[Job], responses: Sequence[Any], last: Sequence[int], *, are_dicts: bool
    ) -> Any:
        assert are_dicts == all(type(one) is dict for one in responses)
        for entry, response in zip(entries, responses, strict=True):
            self.words.setdefault(entry.name, []).append(response["y"])
        return [(one, "unsendable") for one in entries if one.name in self.unsendable]

    def stepped(self, busy_ns: int, active: int) -> None:
        assert busy_ns >= 0 < active

    def failure(self, error: Exception, entry: Job | None = None) -> str:
        self.n_logged += 1
        return type(error).__name__

    def ended(self, entry: Job) -> None:
        self._end(entry, "ended")

    def failed(self, entry: Job, failure: str) -> None:
        self._end(entry, failure)

    def cancelled(self, entry: Job) -> None:
        self._end(entry, "cancelled")

    def postponed(self, entries: Sequence[Job]) -> None:
        self.returned = [*entries, *self.returned]

    def retry(self, entry: Job, failure: str) -> None:
        self._end(entry, "retry")

    def release_failed(self, error: Exception) -> None:
        raise error

    def _end(self, entry: Job, how: str) -> None:
        self.ends.setdefault(entry.name, []).append(how)


class Scene:
    """A stepper whose first turn is over, if there are jobs."""

    def __init__(self, *jobs: Job, **options: Any) -> None:
        self.words = Words(**options)
        self.ends = Ends()
        self.stepper: Stepper[Job, str] = Stepper(self.words, self.ends, ["y"])
        if jobs:
            self.turn(1, *jobs)

    def turn(self, times: int = 1, *jobs: Job) -> None:
        """Turn so often after the jobs arrived."""
        for job in jobs:
            self.stepper.arrive(job)

        async def turns() -> None:
            for _ in range(times):
                await self.stepper.admit_waiting()
                if self.stepper.ready:
                    await self.stepper.step()

        asyncio.run(turns())


@pytest.mark.parametrize("awaits", [False, True])
def test_requests_join_and_leave_between_steps(awaits: bool) -> None:
    scene = Scene(Job("a", 3), awaits=awaits)
    scene.turn(3, Job("b", 1), Job("c", 2))
    assert scene.words.steps == [["a"], ["a", "b", "c"], ["a", "c"]]
    assert scene.ends.words == {"a": [1, 2, 3], "b": [1], "c": [1, 2]}
    assert scene.ends.ends == {key: ["ended"] for key in "abc"}
    assert scene.words.released == {"a": 1, "b": 1, "c": 1}


def test_later_returns_a_request_and_those_behind_it_in_order_or_is_an_error_without_an_active_one() -> None:
    scene = Scene(Job("a"), Job("b"), Job("c"), room=1)
    assert [one.name for one in scene.ends.returned] == ["b", "c"]
    assert scene.words.steps == [["a"]]
    assert Scene(Job("a"), room=0).ends.ends == {"a": ["OutputError"]}


def test_an_exception_of_admit_fails_one_request() -> None:
    scene = Scene(Job("bad", -1), Job("good", 1))
    assert scene.ends.ends == {"bad": ["ValueError"], "good": ["ended"]}
    assert scene.words.released == {"good": 1}


def test_an_exception_of_step_fails_those_that_have_sent_and_returns_the_others() -> None:
    scene = Scene(Job("sent"))
    scene.words.poison = {"new"}
    scene.turn(1, Job("new"), Job("other"))
    assert scene.ends.ends == {"sent": ["ArithmeticError"], "new": ["retry"], "other": ["retry"]}
    assert scene.ends.n_logged == 1
    scene.turn(1, Job("new"))
    assert scene.ends.ends["new"] == ["retry", "ArithmeticError"]
    assert not scene.words.held


@pytest.mark.parametrize("word", [np.array([1]), (np.array([1]),)])
def test_a_response_may_be_an_array_or_a_tuple(word: Any) -> None:
    scene = Scene()
    scene.words.wrong = ([word, Last(word)],)
    scene.turn(1, Job("a"), Job("b"))
    scene.words.wrong = ([[word, "wrong"]],)
    scene.turn()
    assert scene.ends.words == {"a": [1], "b": [1]}
    assert scene.ends.ends == {"a": ["OutputError"], "b": ["ended"]}


@pytest.mark.parametrize("lists", [False, True])
def test_credits_run_out_at_the_same_step_whatever_the_form_of_the_results(lists: bool) -> None:
    first, second = Job("a", 99, credit=3), Job("b", 99, credit=5)
    scene = Scene(first, second)
    for number in range(1, 8):
        in_lists = lists and number % 2
        scene.words.wrong = ([[{"y": 0}]] * len(scene.stepper.ready),) if in_lists else ()
        if number == 2:
            scene.stepper.add_credit(first, 1)
        scene.turn()
    assert scene.words.steps == [["a", "b"]] * 4 + [["b"]]


def test_a_request_fails_once_although_several_of_its_responses_are_wrong() -> None:
    scene = Scene()
    scene.ends.unsendable = {"a"}
    scene.words.wrong = ([[{"y": 1}, {"y": 2}], Last({"y": 3})],)
    scene.turn(1, Job("a"), Job("b", 1))
    assert scene.ends.ends == {"a": ["unsendable"], "b": ["ended"]}


def test_a_request_without_credit_is_paused_and_a_cancelled_one_is_released_before_the_next_step() -> None:
    slow, fast = Job("slow", 9, credit=1), Job("fast", 9)
    scene = Scene(slow, fast)
    scene.turn(2)
    scene.stepper.add_credit(slow, 1)
    scene.stepper.cancel(fast)
    scene.turn()
    assert scene.words.steps == [["slow", "fast"], ["fast"], ["fast"], ["slow"]]
    assert scene.words.released == {"fast": 1}
    scene.stepper.close()
    assert scene.ends.ends == {"fast": ["cancelled"], "slow": ["cancelled"]}
    assert scene.words.released == {"fast": 1, "slow": 1}


@pytest.mark.parametrize("results", [None, 7, {}, [], [None, None]])
def test_a_wrong_number_or_kind_of_results_fails_the_request(results: Any) -> None:
    scene = Scene()
    scene.words.wrong = (results,)
    scene.turn(1, Job("a"))
    assert scene.ends.ends == {"a": ["OutputError"]}


_MOVES = ("arrive", "short", "bad", "turn", "cancel", "credit", "poison", "cure")


@settings(max_examples=examples(200), deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(_MOVES), st.integers(0, 7)), max_size=60),
    st.integers(1, 6),
    st.booleans(),
)
def test_every_request_ends_once_and_is_released_once(
    moves: list[tuple[str, int]], room: int, awaits: bool
) -> None:
    scene = Scene(room=room, awaits=awaits)
    jobs: list[Job] = []
    for move, number in moves:
        if move in {"arrive", "short", "bad"}:
            length = {"arrive": 1 + number, "short": 1, "bad": -1}[move]
            jobs.append(Job(str(len(jobs)), length, credit=1 + number % 3))
            scene.stepper.arrive(jobs[-1])
        elif move == "turn":
            scene.turn(1 + number)
        elif move == "poison":
            scene.words.poison = {str(number)}
        elif move == "cure":
            scene.words.poison = set()
        elif jobs:
            job = jobs[number % len(jobs)]
            (scene.stepper.cancel(job) if move == "cancel" else scene.stepper.add_credit(job, 2))
        for step in scene.words.steps:
            assert step == sorted(step, key=int), "the order of admission"
            assert len(step) <= room
    scene.stepper.close()
    returned = {one.name for one in scene.ends.returned}
    for job in jobs:
        ends = scene.ends.ends.get(job.name, [])
        assert len(ends) == (job.name not in returned), (job.name, ends)
        assert scene.words.released[job.name] <= 1
        words = scene.ends.words.get(job.name, [])
        assert words == list(range(1, len(words) + 1))
    assert not scene.words.held
