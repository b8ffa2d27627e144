"""What bodies of requests hold of the front's memory: no more than allowed, or than the machine has."""

from __future__ import annotations

import dataclasses
import logging

import pytest
from exploring import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from present import present

from gpuserve.core.errors import InvalidArgument, NoMemory
from gpuserve.front.ipc.heap_memory import AHEAD_NBYTES, REQUEST_NBYTES, Intake, Share
from gpuserve.front.requests.server_status import STATUS
from gpuserve.front.requests.validation import check_claim
from gpuserve.model.spec import InstanceSpec, ModelSpec
from gpuserve_worker.memory.arena import Arena, Block
from gpuserve_worker.protocol.tensor import TensorSpec

MIB = 1 << 20


def test_shares_of_all_requests_together_are_limited() -> None:
    intake = Intake(10 * MIB, lambda: None)
    first, second = Share(intake), Share(intake)
    first.hold(6 * MIB)
    assert intake.is_crowded
    text = f"hold {6 * MIB} bytes, expected at most {10 * MIB} with {5 * MIB} more"
    with pytest.raises(NoMemory, match=text):
        second.hold(5 * MIB)
    assert (second.nbytes, intake.nbytes, intake.refused) == (0, 6 * MIB, 1)
    first.hold(2 * MIB)
    second.hold(5 * MIB)
    for share in (first, second):
        share.hold(0)
    assert intake.nbytes == 0
    assert STATUS[NoMemory.code] == (503, 8), "a refused client may try again"


def test_one_address_cannot_have_all_of_it() -> None:
    intake = Intake(8 * MIB, lambda: None)
    first, second, other = Share(intake, "10.0.0.1"), Share(intake, "10.0.0.1"), Share(intake, b"2001:db8")
    first.hold(6 * MIB)
    text = f"from this address hold {6 * MIB} bytes, expected at most 7 times what of {8 * MIB}"
    with pytest.raises(NoMemory, match=text):
        second.hold(MIB + 1)
    second.hold(MIB)
    other.hold(MIB // 2)
    first.hold(0)
    second.hold(6 * MIB)
    for share in (second, other):
        share.hold(0)
    assert intake.nbytes == 0


@settings(max_examples=examples(20))
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=400),
    st.sampled_from(["intake", "arena"]),
)
def test_no_address_gets_more_than_half_while_others_ask(turns: list[tuple[str, bool]], kind: str) -> None:
    """In whichever order requests of an address that takes all it can, and of two others, come and go."""
    limit_nbytes = 64 * MIB
    intake = Intake(limit_nbytes, lambda: None)
    arena = Arena(limit_nbytes, lambda *_: None, lambda _: None)
    held: dict[str, list[tuple[Share, Block | None]]] = {"a": [], "b": [], "c": []}

    def ask(source: str) -> bool:
        share, block = Share(intake, source), None
        try:
            if kind == "intake":
                share.hold(MIB)
            else:
                block = present(arena.claim(MIB))
                share.reserve(block, MIB)
        except NoMemory:
            if block is not None:
                block.free()
            return False
        held[source].append((share, block))
        return True

    def leave(source: str) -> None:
        share, block = held[source].pop()
        share.hold(0)
        if block is not None:
            block.free()

    for source, leaves in turns:
        if leaves and held[source]:
            leave(source)
        else:
            ask(source)
    while ask("a"):
        pass
    assert len(held["a"]) <= 56, "alone it gets 7/8"
    assert held["b"] or held["c"] or ask("b"), "others get something at once"
    for _ in range(80):  # bodies come and go, and all ask for as much as they get
        for source in "abc":
            if held[source]:
                leave(source)
        for source in "bca":
            while ask(source):
                pass
    assert all(len(one) <= 32 for one in held.values()), "no address has more than half"
    assert sum(map(len, held.values())) >= 56, "nearly all of it is used"
    for source, left in held.items():
        while left:
            leave(source)
    assert (intake.nbytes, arena.statistics().blocks) == (0, 0)
    arena.close()


def test_the_only_body_of_an_address_may_take_the_whole_arena() -> None:
    intake, arena = Intake(MIB, lambda: None), Arena(32 * MIB, lambda *_: None, lambda _: None)
    block = present(arena.claim(32 * MIB))
    assert Share(intake, "10.0.0.1").reserve(block, 32 * MIB) == 32 * MIB
    block.free()
    arena.close()


def test_the_objects_of_a_request_count_while_it_holds_anything() -> None:
    intake = Intake(10 * MIB, lambda: None)
    share = Share(intake, "10.0.0.1", REQUEST_NBYTES)
    assert intake.nbytes == 0
    for nbytes in (1, 5000, 17):
        share.hold(nbytes)
        assert intake.nbytes == nbytes + REQUEST_NBYTES
    share.hold(0)
    share.hold(0)
    assert intake.nbytes == 0


def test_the_machine_is_asked_before_it_is_full_and_not_for_every_byte() -> None:
    asked, left = [0], [100 * MIB]

    def available() -> int:
        asked[0] += 1
        return left[0]

    share = Share(Intake(1 << 40, available))
    for nbytes in range(0, 4 * MIB, 4096):
        share.hold(nbytes)
    assert asked == [1]
    left[0] = 5 * MIB
    with pytest.raises(NoMemory, match=f"has {5 * MIB} bytes left"):
        share.hold(64 * MIB)
    share.hold(0)
    with pytest.raises(NoMemory):
        share.hold(20 * MIB)


def test_bodies_leave_as_much_as_they_hold() -> None:
    intake = Intake(1 << 40, lambda: 300 * MIB - intake.nbytes)
    share = Share(intake)
    share.hold(100 * MIB)
    with pytest.raises(NoMemory, match="are needed"):
        share.hold(160 * MIB)
    share.hold(0)


def test_refusals_are_logged_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    share = Share(Intake(1, lambda: None))
    with caplog.at_level(logging.WARNING):
        for _ in range(100):
            with pytest.raises(NoMemory):
                share.hold(2)
    assert len(caplog.records) == 1


def test_a_block_is_there_as_far_as_its_bytes_have_come_and_as_far_again() -> None:
    arena = Arena(1 << 30, lambda *_: None, lambda _: None)
    intake = Intake(MIB, lambda: None)
    block = present(arena.claim(1 << 28))
    share = Share(intake)
    assert share.reserve(block, 1) <= 1 << 16
    assert share.reserve(block, MIB) == 2 * MIB
    assert share.reserve(block, 8 * MIB) == 8 * MIB + AHEAD_NBYTES
    arena.limit_nbytes = 16 * MIB
    with pytest.raises(NoMemory, match="limit"):
        share.reserve(block, 16 * MIB)
    assert (intake.nbytes, intake.refused) == (0, 1)
    block.free()
    arena.close()


def test_a_claim_over_what_the_model_declares_is_refused() -> None:
    fixed = TensorSpec("x", "FP32", (100, 100)), TensorSpec("y", "FP64", (10,))
    spec = ModelSpec("m", fixed, (), 4, (InstanceSpec("m_0", "cpu", {}),))
    check_claim(spec, 4 * 40_000)
    with pytest.raises(InvalidArgument, match=r"160001 bytes for model 'm' .* at most 160000 bytes"):
        check_claim(spec, 4 * 40_000 + 1)
    for free in (TensorSpec("z", "BYTES", (1,)), TensorSpec("z", "FP32", (-1, 2))):
        check_claim(dataclasses.replace(spec, inputs=(*fixed, free)), 1 << 40)
