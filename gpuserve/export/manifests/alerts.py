"""Alert rules, in the metrics of this server. Each says what is wrong, and then what to look at."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from gpuserve.export.manifests import metric_names as m
from gpuserve.export.sizing.values import readable

CRITICAL: Final = "critical"
WARNING: Final = "warning"
#: No key says how long a request should wait; longer than this is noticed by people.
_QUEUE_P99_S: Final = 1.0
_FULL: Final = 0.8
_STALE_READING_S: Final = 60
_RENEWAL_DAYS: Final = 7


@dataclass(frozen=True, slots=True)
class Alert:
    """``expression`` has ``{s}`` where the labels go that choose our pods."""

    name: str
    severity: str
    lasts: str
    expression: str
    summary: str
    description: str

    def as_rule(self, selector: str) -> dict[str, Any]:
        return {
            "alert": self.name,
            "expr": self.expression.replace("{s}", selector),
            "for": self.lasts,
            "labels": {"severity": self.severity},
            "annotations": {"summary": self.summary, "description": self.description},
        }


def scrape_selector(name: str, namespace: str) -> str:
    """The labels that Prometheus gives to what it finds by our ServiceMonitor."""
    space = f',namespace="{namespace}"' if namespace else ""
    return f'job="{name}-metrics"{space}'


def rules(
    metadata: dict[str, Any], selector: str, name: str, *, max_arena_nbytes: int, on_gpu: bool
) -> dict[str, Any]:
    """The PrometheusRule with all alerts."""
    found = [*_serving(), *_load(max_arena_nbytes), *(_gpus() if on_gpu else ())]
    group = {"name": name, "rules": [alert.as_rule(selector) for alert in found]}
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": metadata,
        "spec": {"groups": [group]},
    }


def _serving() -> Iterator[Alert]:
    yield Alert(
        "GpuserveAbsent", CRITICAL, "2m", "absent(up{{s}} == 1)",
        "No pod of {{ $labels.job }} answers Prometheus.",
        "Look at the pods: are there any, are they ready, may monitoring reach them (NetworkPolicy)?",
    )  # fmt: skip
    yield Alert(
        "GpuserveModelDown", CRITICAL, "2m", f"max by (job, model, version) ({m.WORKER_UP}{{{{s}}}}) == 0",
        "Model {{ $labels.model }} has no instance in any pod.",
        "Its requests get UNAVAILABLE. The log of a pod has the traceback of the load or the death.",
    )  # fmt: skip
    yield Alert(
        "GpuserveInstanceDown", WARNING, "5m", f"{m.WORKER_UP}{{{{s}}}} == 0",
        "Instance {{ $labels.instance }} of {{ $labels.model }} in {{ $labels.pod }} is down.",
        "It is started again and again, with growing pauses. The log of the pod says why it ends.",
    )  # fmt: skip
    yield Alert(
        "GpuserveInstanceRestarts", WARNING, "5m", f"rate({m.WORKER_RESTARTS}{{{{s}}}}[5m]) > 0",
        "Instance {{ $labels.instance }} of {{ $labels.model }} in {{ $labels.pod }} dies again and again.",
        "Each death costs its batch one more run. Look for the signal or the traceback in the log.",
    )  # fmt: skip
    yield Alert(
        "GpuserveFailures", WARNING, "5m",
        f'sum by (job, model) (rate({m.FAILURES}{{{{s}},code="INTERNAL"}}[5m])) '
        f"> 0.01 * (sum by (job, model) (rate({m.SUCCESSES}{{{{s}}}}[5m])) "
        f"+ sum by (job, model) (rate({m.FAILURES}{{{{s}}}}[5m])))",
        "More than 1 % of the requests for {{ $labels.model }} fail in its callable.",
        "The callable raises, or answers what its declaration does not allow. The log has the traceback.",
    )  # fmt: skip
    yield Alert(
        "GpuserveCertificateExpiry", WARNING, "10m",
        f"{m.CERTIFICATE_EXPIRY}{{{{s}}}} < {_RENEWAL_DAYS} * 86400",
        f"The TLS certificate of {{{{ $labels.pod }}}} expires in less than {_RENEWAL_DAYS} days.",
        "A renewed one is used as soon as it is in the Secret: is it renewed, and is it in the pod?",
    )  # fmt: skip


def _load(max_arena_nbytes: int) -> Iterator[Alert]:
    yield Alert(
        "GpuserveQueueFull", WARNING, "5m",
        f'sum by (job, model) (rate({m.REJECTIONS}{{{{s}},reason="queue_full"}}[5m])) '
        f"> 0.01 * (sum by (job, model) (rate({m.SUCCESSES}{{{{s}}}}[5m])) "
        f"+ sum by (job, model) (rate({m.REJECTIONS}{{{{s}}}}[5m])))",
        "More than 1 % of the requests for {{ $labels.model }} are refused: its queue is full.",
        "More pods or instances are needed, or models[].queue is too small for bursts.",
    )  # fmt: skip
    yield Alert(
        "GpuserveSlowQueue", WARNING, "10m",
        "histogram_quantile(0.99, sum by (job, model, le) "
        f"(rate({m.QUEUE_SECONDS}_bucket{{{{s}}}}[5m]))) > {_QUEUE_P99_S:g}",
        f"One request in a hundred for {{{{ $labels.model }}}} waits longer than {_QUEUE_P99_S:g} s.",
        "Are there as many pods as there may be? Change the limit where another one matters to users.",
    )  # fmt: skip
    yield Alert(
        "GpuserveSaturated", WARNING, "15m", f"avg by (job, model) ({m.SATURATION}{{{{s}}}}) > 1",
        "{{ $labels.model }} has had more requests than places for 15 minutes.",
        "The autoscaler has reached its maximum, or new pods do not come up.",
    )  # fmt: skip
    nbytes, full = round(max_arena_nbytes * _FULL), readable(max_arena_nbytes)
    yield Alert(
        "GpuserveArenaFull", WARNING, "5m", f"{m.ARENA_NBYTES}{{{{s}}}} > {nbytes}",
        f"{{{{ $labels.model }}}} in {{{{ $labels.pod }}}} has taken 80 % of {full} for inputs.",
        "At server.max_arena_nbytes requests get RESOURCE_EXHAUSTED.",
    )  # fmt: skip


def _gpus() -> Iterator[Alert]:
    yield Alert(
        "GpuserveGpuLost", CRITICAL, "0m", f'{m.GPU_STATE}{{{{s}},state="lost"}} == 1',
        "GPU {{ $labels.gpu_uuid }} of {{ $labels.pod }} is lost.",
        "Its instances do not come back; the node needs a reset, or the pod has to be made anew.",
    )  # fmt: skip
    yield Alert(
        "GpuserveGpuErrors", WARNING, "0m",
        f'increase({m.GPU_ECC}{{{{s}},kind="uncorrected"}}[1h]) > 0 or {m.GPU_REMAP_FAILED}{{{{s}}}} == 1',
        "GPU {{ $labels.gpu_uuid }} of {{ $labels.pod }} has errors in its memory.",
        "Drain the node and reset the GPU; where rows cannot be remapped, replace it.",
    )  # fmt: skip
    yield Alert(
        "GpuserveGpuXid", WARNING, "0m", f"increase({m.GPU_XIDS}{{{{s}}}}[10m]) > 0",
        "The driver reported Xid {{ $labels.xid }} for GPU {{ $labels.gpu_uuid }} of {{ $labels.pod }}.",
        "NVIDIA's list of Xid errors says whether the application or the GPU is to blame.",
    )  # fmt: skip
    yield Alert(
        "GpuserveGpuMemory", WARNING, "5m",
        f"increase({m.OOM_SPLITS}{{{{s}}}}[10m]) > 0",
        "Batches of {{ $labels.model }} in {{ $labels.pod }} do not fit into the memory of its GPU.",
        "They are run in halves. Lower max_batch_size, or put fewer instances on one GPU.",
    )  # fmt: skip
    yield Alert(
        "GpuserveGpuUnread", WARNING, "5m", f"{m.GPU_READING_AGE}{{{{s}}}} > {_STALE_READING_S}",
        "The driver of {{ $labels.pod }} has not answered for a minute.",
        "A GPU that fell off the bus does that; look at the log of the kernel.",
    )  # fmt: skip
