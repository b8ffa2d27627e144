"""Every flag of Triton's server, and beside each what becomes of it here: the one table. What the values of
several flags come to together is in ``meaning.py``.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final


class Kind(enum.Enum):
    """How the value of a flag is read; the value is what it is called in a message."""

    TEXT = "a text"
    INTEGER = "an integer"
    NUMBER = "a number"
    BOOLEAN = "true or false"
    #: Booleans are levels too: true is 1.
    LEVEL = "an integer, or true or false"
    #: There is no value.
    BARE = "no value"


class Fate(enum.Enum):
    """What gpuserve does with a flag of Triton's server."""

    SETTING = "is a setting of gpuserve"
    PART = "is part of a setting of gpuserve, or of what is served"
    NO_EFFECT = "has no effect"
    REFUSED = "is refused"


@dataclass(frozen=True)
class Flag:
    """One flag, without its dashes. ``text`` is the setting of ours, what it comes to, why it makes no
    difference, or what to use instead. ``words`` are the values that there are, in any case.
    """

    name: str
    kind: Kind
    fate: Fate
    text: str
    repeated: bool = False
    words: tuple[str, ...] = ()
    #: What else is to be said of it.
    more: str = ""


def _setting(
    name: str, kind: Kind, setting: str, *, repeated: bool = False, words: str = "", more: str = ""
) -> Flag:
    return Flag(name, kind, Fate.SETTING, setting, repeated, tuple(words.split()), more)


def _part(name: str, kind: Kind, text: str, *, repeated: bool = False, words: str = "") -> Flag:
    return Flag(name, kind, Fate.PART, text, repeated, tuple(words.split()))


def _same(name: str, kind: Kind, why: str, *, repeated: bool = False, words: str = "") -> Flag:
    return Flag(name, kind, Fate.NO_EFFECT, why, repeated, tuple(words.split()))


def _refused(name: str, kind: Kind, instead: str, *, repeated: bool = False) -> Flag:
    return Flag(name, kind, Fate.REFUSED, instead, repeated)


_TEXT, _INTEGER, _NUMBER, _BOOLEAN = Kind.TEXT, Kind.INTEGER, Kind.NUMBER, Kind.BOOLEAN
_TLS: Final = "tls_certfile, tls_keyfile and tls_client_ca, with tls_ports: [grpc]"
_RULES: Final = "access_rules, which hold for HTTP and gRPC alike"
_TRACE: Final = "trace"
_LEVEL: Final = "log_level: the least severe of those that are on"
_REMOTE: Final = (
    "with explicit also remote_control: [model-repository]; give restrictions where strangers ask"
)
_LOOP: Final = "one event loop reads all connections; doors is how many processes do"
_BALANCER: Final = "give each server ports of its own behind a balancer, or let one server have several doors"
_PLATFORM: Final = "route its requests to the HTTP port by a proxy"
_NO_PLATFORM: Final = "there is no such endpoint"
_PINGS: Final = (
    "pings are answered at once, floods of them are refused, and idle_timeout_s closes what is idle"
)
_NO_BACKENDS: Final = "models run in Python processes, and no shared library is searched"
_MEMORY: Final = "memory on the device is taken by whoever uses it; none is pooled"
_METRICS: Final = "what can be read is always shown, and read as often as /metrics is asked for"

#: In the order of ``tritonserver --help``.
FLAGS: Final = (
    _setting("id", _TEXT, "name"),
    _setting("exit-timeout-secs", _INTEGER, "drain_timeout_s"),
    _part("log-verbose", Kind.LEVEL, "log_level: debug above 0"),
    _part("log-info", _BOOLEAN, _LEVEL),
    _part("log-warning", _BOOLEAN, _LEVEL),
    _part("log-error", _BOOLEAN, _LEVEL),
    _same(
        "log-format",
        _TEXT,
        "the lines are ours; clients choose the form of their time by /v2/logging",
        words="default ISO8601",
    ),
    _part("log-file", _TEXT, "the log is appended to that file"),
    _part("model-store", _TEXT, "the same as --model-repository", repeated=True),
    _part("model-repository", _TEXT, "the folder whose models are served", repeated=True),
    _setting("exit-on-error", _BOOLEAN, "exit_on_error"),
    _same(
        "disable-auto-complete-config",
        Kind.BARE,
        "what config.pbtxt says holds either way, and only what it leaves out is completed",
    ),
    _part("strict-readiness", _BOOLEAN, "min_ready_instances: 1, or 0 where it is false"),
    _setting("model-control-mode", _TEXT, "model_control", words="none poll explicit", more=_REMOTE),
    _setting("repository-poll-secs", _INTEGER, "repository_poll_s"),
    _part(
        "load-model",
        _TEXT,
        "load_at_start, of mode explicit alone; * is every model, and alone",
        repeated=True,
    ),
    _refused("model-config-name", _TEXT, "copy that file to the config.pbtxt of its model"),
    _same("model-load-thread-count", _INTEGER, "all models load side by side, each in its own processes"),
    _same("model-load-retry-count", _INTEGER, "a load that failed is tried again when it is asked for again"),
    _refused("model-namespacing", _BOOLEAN, "give models names that differ, or servers of their own"),
    _same("enable-peer-access", _BOOLEAN, "the libraries of the models decide that"),
    _part("allow-http", _BOOLEAN, "http_port: null where it is false"),
    _setting("http-address", _TEXT, "host", more="of gRPC too, unless it has its own"),
    _part("http-port", _INTEGER, "http_port"),
    _refused("reuse-http-port", _BOOLEAN, _BALANCER),
    _setting("http-header-forward-pattern", _TEXT, "http_header_forward_pattern"),
    _same("http-thread-count", _INTEGER, _LOOP),
    _part("http-restricted-api", _TEXT, _RULES, repeated=True),
    _part("allow-grpc", _BOOLEAN, "grpc_port: null where it is false"),
    _setting("grpc-address", _TEXT, "grpc_host"),
    _part("grpc-port", _INTEGER, "grpc_port"),
    _refused("reuse-grpc-port", _BOOLEAN, _BALANCER),
    _setting("grpc-header-forward-pattern", _TEXT, "grpc_header_forward_pattern"),
    _same("grpc-infer-allocation-pool-size", _INTEGER, "what a request needs is kept for the next by itself"),
    _part("grpc-use-ssl", _BOOLEAN, _TLS),
    _part("grpc-use-ssl-mutual", _BOOLEAN, _TLS),
    _part("grpc-server-cert", _TEXT, _TLS),
    _part("grpc-server-key", _TEXT, _TLS),
    _part("grpc-root-cert", _TEXT, _TLS),
    _setting(
        "grpc-infer-response-compression-level",
        _TEXT,
        "grpc_response_compression",
        words="none low medium high",
    ),
    _same("grpc-keepalive-time", _INTEGER, _PINGS),
    _same("grpc-keepalive-timeout", _INTEGER, _PINGS),
    _same("grpc-keepalive-permit-without-calls", _BOOLEAN, _PINGS),
    _same("grpc-http2-max-pings-without-data", _INTEGER, _PINGS),
    _same("grpc-http2-min-recv-ping-interval-without-data", _INTEGER, _PINGS),
    _same("grpc-http2-max-ping-strikes", _INTEGER, _PINGS),
    _part("grpc-max-connection-age", _INTEGER, "max_connection_age_s, of HTTP as well; here in milliseconds"),
    _same("grpc-max-connection-age-grace", _INTEGER, "a connection that is too old finishes what it has"),
    _part("grpc-restricted-protocol", _TEXT, _RULES, repeated=True),
    _refused("allow-sagemaker", _BOOLEAN, _PLATFORM),
    _same("sagemaker-port", _INTEGER, _NO_PLATFORM),
    _same("sagemaker-safe-port-range", _TEXT, _NO_PLATFORM),
    _same("sagemaker-thread-count", _INTEGER, _NO_PLATFORM),
    _refused("allow-vertex-ai", _BOOLEAN, _PLATFORM),
    _same("vertex-ai-port", _INTEGER, _NO_PLATFORM),
    _same("vertex-ai-thread-count", _INTEGER, _NO_PLATFORM),
    _same("vertex-ai-default-model", _TEXT, _NO_PLATFORM),
    _part("allow-metrics", _BOOLEAN, "metrics_port: null where it is false"),
    _same("allow-gpu-metrics", _BOOLEAN, _METRICS),
    _same("allow-cpu-metrics", _BOOLEAN, _METRICS),
    _setting("metrics-address", _TEXT, "metrics_host"),
    _part("metrics-port", _INTEGER, "metrics_port"),
    _same("metrics-interval-ms", _NUMBER, _METRICS),
    _part(
        "metrics-config",
        _TEXT,
        "summary_latencies=true is metrics_summaries; other settings make no difference: counters are always "
        "there",
        repeated=True,
    ),
    _part("trace-config", _TEXT, _TRACE, repeated=True),
    _same("backend-directory", _TEXT, _NO_BACKENDS),
    _same(
        "backend-config",
        _TEXT,
        "workers' memory grows by itself; what a model needs is in its config.pbtxt",
        repeated=True,
    ),
    _same("repoagent-directory", _TEXT, _NO_BACKENDS),
    _part(
        "cache-config",
        _TEXT,
        "local,size=… is response_cache_nbytes; other caches are refused",
        repeated=True,
    ),
    _same("cache-directory", _TEXT, "answers are kept in the server's own memory"),
    _setting("rate-limit", _TEXT, "rate_limit", words="execution_count off"),
    _setting("rate-limit-resource", _TEXT, "rate_limit_resources", repeated=True),
    _same(
        "pinned-memory-pool-byte-size",
        _INTEGER,
        "shared memory is page-locked as it is used; shared_memory_locked_nbytes bounds that of clients",
    ),
    _same("cuda-memory-pool-byte-size", _TEXT, _MEMORY, repeated=True),
    _same("cuda-virtual-address-size", _TEXT, _MEMORY, repeated=True),
    _same(
        "min-supported-compute-capability",
        _NUMBER,
        "a model whose library cannot use its GPU says so when it is loaded",
    ),
    _same("buffer-manager-thread-count", _INTEGER, "tensors are gathered by the front, in shared memory"),
    _same(
        "host-policy",
        _TEXT,
        "workers of a GPU keep to the CPUs and the memory next to it (numa_affinity)",
        repeated=True,
    ),
    _refused("model-load-gpu-limit", _TEXT, "give models of one GPU what fits into it", repeated=True),
    _same(
        "strict-model-config",
        _BOOLEAN,
        "what config.pbtxt says holds either way, and only what it leaves out is completed",
    ),
    _part("response-cache-byte-size", _INTEGER, "response_cache_nbytes"),
    _part("trace-file", _TEXT, _TRACE),
    _part("trace-level", _TEXT, _TRACE, repeated=True),
    _part("trace-rate", _INTEGER, _TRACE),
    _part("trace-count", _INTEGER, _TRACE),
    _part("trace-log-frequency", _INTEGER, _TRACE),
)
#: The same by name.
BY_NAME: Final = {flag.name: flag for flag in FLAGS}
