"""The health of GPUs as states: what makes one lost, what brings it back, and what is told of all of them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuserve.core.states import IllegalTransition
from gpuserve.devices.machine import GpuReading, GpuReport, NvmlRound, RemappedRows, Xid
from gpuserve.front.observability.gpu_health.gpu_monitor import ModelGpuMemory, gpu_families, gpus_document
from gpuserve.front.observability.gpu_health.gpu_states import (
    MAX_PROBATION_S,
    NON_FENCING_XIDS,
    PATIENCE_S,
    PROBATION_READINGS,
    STEADY_S,
    TRANSITIONS,
    GpuEvent,
    GpuSet,
    GpuState,
    LostGpu,
    WatchedGpu,
)
from gpuserve.front.observability.metrics import prometheus

UUID = "GPU-a"
OTHER = "GPU-b"
PROBATION_S = 1.0 * PROBATION_READINGS


def report(uuid: str = UUID, device: str = "cuda:0", fault: str = "", **figures: Any) -> GpuReport:
    return GpuReport(uuid, device, "A GPU", GpuReading(**figures), fault)


def silence(uuid: str = UUID) -> GpuReport:
    return GpuReport(uuid, "cuda:0", "A GPU", None)


def gone(uuid: str = UUID) -> GpuReport:
    return GpuReport(uuid, "cuda:0", "A GPU", None, "NVML says: GPU is lost")


def life() -> WatchedGpu:
    return WatchedGpu(UUID, "cuda:0", "", 1.0)


def back_after(one: WatchedGpu, lost_at: float) -> float:
    """How long a GPU that answers well from now on stays lost."""
    for second in itertools.count():
        one.on_report(report(), lost_at + second)
        if one.state is GpuState.HEALTHY:
            return float(second)
    raise AssertionError


# ---- one GPU ------------------------------------------------------------------------------------


def test_a_gpu_that_does_not_answer_is_suspect_until_it_does() -> None:
    one = life()
    one.on_report(silence(), 1.0)
    assert one.state is GpuState.SUSPECT
    one.on_report(report(), 2.0)
    assert one.state is GpuState.HEALTHY
    assert one.reason == ""


@pytest.mark.parametrize("before", ["healthy", "suspect"])
def test_a_gpu_that_is_gone_is_lost(before: str) -> None:
    one = life()
    one.on_report(report() if before == "healthy" else silence(), 0.0)
    one.on_report(gone(), 1.0)
    assert one.state is GpuState.LOST
    assert one.reason == "NVML says: GPU is lost"


@pytest.mark.parametrize("number", [13, 31, 43, 45, 63, 68, 94, 109, 154])
def test_a_gpu_stays_in_use_after_errors_of_programs_and_informational_ones(number: int) -> None:
    one = life()
    one.xid(number, 0.0)
    assert one.state is GpuState.HEALTHY
    assert NON_FENCING_XIDS[number]


@pytest.mark.parametrize("number", [48, 64, 74, 79, 95, 119, 12345])
def test_any_other_xid_is_a_fault(number: int) -> None:
    one = life()
    one.xid(number, 0.0)
    assert (one.state, one.reason) == (GpuState.LOST, f"its driver reported Xid {number}")


@pytest.mark.parametrize(
    ("counts", "contained_before", "reason"),
    [
        (
            [7, 7, 8],
            None,
            "its memory had 1 uncorrectable error",
        ),  # the errors before the first reading are old
        ([7, 0, 2], None, "its memory had 2 uncorrectable errors"),  # a reset has cleared the counter
        ([0, 1, 2], 1, "its memory had 1 uncorrectable error"),  # the driver has contained the first error
    ],
)
def test_uncorrectable_errors_lose_a_gpu(
    counts: list[int], contained_before: int | None, reason: str
) -> None:
    one = life()
    for number, count in enumerate(counts):
        assert one.state is GpuState.HEALTHY
        if number == contained_before:
            one.xid(94, 50.0)
        one.on_report(report(ecc_uncorrected=count), 49.0 + number * 2 + (number == 2) * 50)
    assert (one.state, one.reason) == (GpuState.LOST, reason)


@pytest.mark.parametrize("trouble", [None, silence(), gone()])
def test_a_lost_gpu_is_back_after_a_time_of_good_answers(trouble: GpuReport | None) -> None:
    one = life()
    one.on_report(gone(), 0.0)
    if trouble is not None:  # it begins that time again
        one.on_report(report(), 1.0)
        one.on_report(trouble, PROBATION_S)
    assert back_after(one, PROBATION_S + 1) == PROBATION_S
    assert one.reason == ""


def test_errors_that_go_on_keep_it_lost() -> None:
    one = life()
    one.xid(48, 0.0)
    for second in range(20):
        one.on_report(report(ecc_uncorrected=second), second)
    assert one.state is GpuState.LOST
    assert one.reason == "its driver reported Xid 48", "the first reason is the one that is told"


def test_one_that_comes_and_goes_waits_longer_each_time_up_to_a_limit() -> None:
    one, now, waited = life(), 0.0, []
    for _ in range(10):
        one.xid(79, now)
        waited.append(back_after(one, now))
        now += waited[-1] + 1
    assert waited[:4] == [PROBATION_S, PROBATION_S * 2, PROBATION_S * 4, PROBATION_S * 8]
    assert waited[-1] == MAX_PROBATION_S


def test_one_that_was_healthy_for_long_begins_afresh() -> None:
    one = life()
    one.xid(79, 0.0)
    back_after(one, 0.0)
    one.xid(79, STEADY_S + 100)
    assert back_after(one, STEADY_S + 100) == PROBATION_S


def test_there_is_no_way_back_but_by_the_table() -> None:
    ends = {event for (before, event), after in TRANSITIONS.items() if before is GpuState.LOST is not after}
    assert ends == {GpuEvent.BACK}
    with pytest.raises(IllegalTransition, match="is HEALTHY, where BACK cannot"):
        life()._apply(GpuEvent.BACK)


@given(st.lists(st.sampled_from(["good", "silent", "gone", "xid", "application", "ecc"]), max_size=60))
def test_a_lost_gpu_is_never_back_before_its_time(events: list[str]) -> None:
    one, good_for, errors, now = life(), 0, 0, 0
    for event in events:
        was_lost = one.state is GpuState.LOST
        now += event not in {"xid", "application"}  # a round of questions; errors come in between
        errors += event == "ecc"
        match event:
            case "good" | "ecc":
                one.on_report(report(ecc_uncorrected=errors), now)
            case "silent":
                one.on_report(silence(), now)
            case "gone":
                one.on_report(gone(), now)
            case "xid":
                one.xid(79, now)
            case "application":
                one.xid(13, now)
        if event != "application":
            good_for = good_for + 1 if event == "good" else 0
        if was_lost and one.state is not GpuState.LOST:
            assert good_for > PROBATION_READINGS
        assert (one.reason != "") is (one.state is GpuState.LOST)


# ---- all GPUs -----------------------------------------------------------------------------------


def fleet(*reports: GpuReport) -> GpuSet:
    made = GpuSet(1.0, 0.0)
    made.update(NvmlRound(reports or (report(), report(OTHER, "cuda:1"))), 0.0)
    return made


def test_a_gpu_that_the_driver_does_not_list_any_more_is_lost() -> None:
    gpus = fleet()
    gpus.update(NvmlRound((report(),)), 1.0)
    assert gpus.lost() == (LostGpu(OTHER, "cuda:1", "its driver does not list it any more"),)
    assert gpus.states() == {UUID: GpuState.HEALTHY, OTHER: GpuState.LOST}


def test_an_xid_is_for_the_gpu_that_it_names_and_counted_whatever_it_is() -> None:
    gpus = fleet()
    for uuids, number in (((UUID,), 13), ((UUID,), 13), ((OTHER,), 95), (("GPU-unknown",), 79), ((), 79)):
        gpus.count_xid(Xid(uuids, number), 1.0)
    assert [one.uuid for one in gpus.lost()] == [OTHER]
    assert {one.uuid: dict(one.xids) for one in gpus} == {UUID: {13: 2}, OTHER: {95: 1}}


def test_without_news_for_long_nothing_is_known_any_more() -> None:
    gpus = fleet(report(temperature_c=40))
    gpus.check_age(1.0 + PATIENCE_S)
    assert not gpus.is_stale(1.0 + PATIENCE_S)
    assert [one.reading for one in gpus] == [GpuReading(temperature_c=40)]
    gpus.check_age(1.1 + PATIENCE_S)
    assert gpus.is_stale(1.1 + PATIENCE_S)
    assert [(one.reading, one.state) for one in gpus] == [(None, GpuState.SUSPECT)]
    gpus.update(NvmlRound((report(),)), 10.0)
    assert gpus.states() == {UUID: GpuState.HEALTHY}
    assert not gpus.is_stale(10.0)


def test_a_new_front_goes_on_where_the_last_one_was() -> None:
    lost = LostGpu(UUID, "cuda:0", "its driver reported Xid 48")
    gpus = GpuSet(1.0, 0.0)
    gpus.restore([lost], 0.0)
    gpus.update(NvmlRound((report(),)), 0.5)
    assert gpus.lost() == (lost,)
    gpus.update(NvmlRound((report(),)), 0.5 + PROBATION_S)
    assert gpus.lost() == ()


def test_models_have_the_last_word_on_what_a_gpu_is_called() -> None:
    gpus = fleet(report(OTHER, "cuda:0"))
    gpus.set_device(OTHER, "cuda:1")
    gpus.set_device("GPU-c", "cuda:2")
    gpus.update(NvmlRound((report(OTHER, "cuda:0"), report("GPU-c", "cuda:1"))), 1.0)
    assert {one.uuid: one.device for one in gpus} == {OTHER: "cuda:1", "GPU-c": "cuda:2"}


# ---- what is told -------------------------------------------------------------------------------

FULL = GpuReading(
    memory_total_nbytes=1000,
    memory_used_nbytes=400,
    utilization=0.25,
    temperature_c=41,
    power_w=70.5,
    power_limit_w=700.0,
    energy_j=1.5,
    ecc_corrected=3,
    ecc_uncorrected=0,
    remapped_rows=RemappedRows(1, 2, True, False),
    retired_pages_pending=False,
    slowdowns=frozenset({"thermal"}),
    processes={17: 100},
)


def lines(gpus: GpuSet, *models: ModelGpuMemory) -> list[str]:
    text = prometheus.page(gpu_families(gpus, models, 0.5)).decode()
    return [line for line in text.splitlines() if not line.startswith("#")]


def test_the_names_that_boards_know() -> None:
    found = [line for line in lines(fleet(GpuReport(UUID, "cuda:0", "", FULL))) if line.startswith("nv_")]
    assert found == [
        'nv_gpu_utilization{gpu_uuid="GPU-a"} 0.25',
        'nv_gpu_memory_total_bytes{gpu_uuid="GPU-a"} 1000',
        'nv_gpu_memory_used_bytes{gpu_uuid="GPU-a"} 400',
        'nv_gpu_power_usage{gpu_uuid="GPU-a"} 70.5',
        'nv_gpu_power_limit{gpu_uuid="GPU-a"} 700.0',
        'nv_energy_consumption{gpu_uuid="GPU-a"} 1.5',
    ]


def test_our_own_metrics_tell_more() -> None:
    gpus = fleet(GpuReport(UUID, "cuda:0", "", FULL))
    gpus.count_xid(Xid((UUID,), 31), 0.0)
    at = 'device="cuda:0",gpu_uuid="GPU-a"'
    found = lines(gpus, ModelGpuMemory("m", "2", UUID, "cuda:0", 300))
    for line in (
        f"gpuserve_gpu_temperature_celsius{{{at}}} 41",
        f"gpuserve_gpu_row_remap_pending{{{at}}} 1",
        f"gpuserve_gpu_row_remap_failed{{{at}}} 0",
        f"gpuserve_gpu_retired_pages_pending{{{at}}} 0",
        f'gpuserve_gpu_state{{{at},state="healthy"}} 1',
        f'gpuserve_gpu_state{{{at},state="lost"}} 0',
        f'gpuserve_gpu_ecc_errors_total{{{at},kind="corrected"}} 3',
        f'gpuserve_gpu_remapped_rows{{{at},kind="uncorrected"}} 2',
        f'gpuserve_gpu_slowdown{{{at},reason="thermal"}} 1',
        f'gpuserve_gpu_slowdown{{{at},reason="power_cap"}} 0',
        f'gpuserve_gpu_xid_errors_total{{{at},xid="31"}} 1',
        "gpuserve_gpu_reading_age_seconds 0.5",
        f'gpuserve_model_gpu_memory_bytes{{{at},model="m",version="2"}} 300',
    ):
        assert line in found


@pytest.mark.parametrize(("reading", "age_s"), [(GpuReading(temperature_c=40), 0.0), (FULL, 100.0)])
def test_unknown_and_old_figures_of_a_gpu_are_not_shown(reading: dict[str, Any], age_s: float) -> None:
    gpus = fleet(GpuReport(UUID, "cuda:0", "", reading))
    gpus.check_age(age_s)
    names = {line.split("{")[0].split()[0] for line in lines(gpus)}
    told = set() if age_s else {"gpuserve_gpu_temperature_celsius"}
    assert names == told | {"gpuserve_gpu_state", "gpuserve_gpu_reading_age_seconds"}


def test_old_or_absent_figures_are_told_as_such() -> None:
    gpus = fleet(GpuReport(UUID, "cuda:0", "", FULL))
    gpus.check_age(100.0)
    told = gpus_document(gpus, [], 100.0, stale=True)
    assert (told["stale"], told["age_seconds"]) == (True, 100.0)
    assert (told["gpus"][0]["reading"], told["gpus"][0]["state"]) == (None, "SUSPECT")
    none = GpuSet(1.0, 0.0)
    assert lines(none) == []
    nothing = {"stale": False, "age_seconds": None, "gpus": []}
    assert gpus_document(none, [], float("inf"), stale=False) == nothing


def test_all_of_a_gpu_as_json() -> None:
    gpus = fleet(GpuReport(UUID, "cuda:0", "A GPU", FULL))
    memory = [ModelGpuMemory("m", "1", UUID, "cuda:0", 300), ModelGpuMemory("m", "1", OTHER, "cuda:1", 5)]
    (told,) = gpus_document(gpus, memory, 0.25, stale=False)["gpus"]
    assert told.pop("reading") == {
        "memory_total_bytes": 1000,
        "memory_used_bytes": 400,
        "utilization": 0.25,
        "temperature_celsius": 41,
        "power_watts": 70.5,
        "power_limit_watts": 700.0,
        "energy_joules": 1.5,
        "ecc_errors_corrected": 3,
        "ecc_errors_uncorrected": 0,
        "remapped_rows": {"corrected": 1, "uncorrected": 2, "pending": True, "failed": False},
        "retired_pages_pending": False,
        "slowdowns": ["thermal"],
    }
    assert told == {
        "uuid": UUID,
        "device": "cuda:0",
        "name": "A GPU",
        "state": "HEALTHY",
        "reason": "",
        "xid_errors": {},
        "models": [{"name": "m", "version": "1", "memory_bytes": 300}],
    }
