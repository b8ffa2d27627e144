"""The table of all flags of Triton's server. ``option_settings.py`` converts their values to settings."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import partial
from typing import Final


class FlagKind(enum.Enum):
    """The form of a flag's value. The enum's value is the name of the form in messages."""

    TEXT = "a text"
    INTEGER = "an integer"
    NUMBER = "a number"
    BOOLEAN = "true or false"
    #: A boolean is a level too: true is 1.
    LEVEL = "an integer, or true or false"
    BARE = "no value"


class FlagFate(enum.Enum):
    """The treatment of a flag of Triton's server by gpuserve."""

    SETTING = "is a setting of gpuserve"
    PART = "is part of a setting of gpuserve, or of what is served"
    NO_EFFECT = "has no effect"
    REFUSED = "is refused"


@dataclass(frozen=True)
class TritonFlag:
    """One flag, without its dashes. ``text`` is the name of our setting, the effect, the reason why the flag
    has no effect, or what to use instead. ``words`` are the possible values, in any case.
    """

    name: str
    kind: FlagKind
    fate: FlagFate
    text: str
    repeated: bool = False
    words: tuple[str, ...] = ()
    #: A remark that is added to ``text``.
    more: str = ""


def _flag(
    fate: FlagFate,
    name: str,
    kind: FlagKind,
    text: str,
    repeated: bool = False,
    words: str = "",
    more: str = "",
) -> TritonFlag:
    return TritonFlag(name, kind, fate, text, repeated, tuple(words.split()), more)


_setting, _part = partial(_flag, FlagFate.SETTING), partial(_flag, FlagFate.PART)
_ineffective, _refused = partial(_flag, FlagFate.NO_EFFECT), partial(_flag, FlagFate.REFUSED)


_TEXT, _INTEGER, _NUMBER, _BOOLEAN = FlagKind.TEXT, FlagKind.INTEGER, FlagKind.NUMBER, FlagKind.BOOLEAN
_TLS: Final = "tls_certfile, tls_keyfile and tls_client_ca, with tls_ports: [grpc]"
_RULES: Final = "access_rules, which hold for HTTP and gRPC alike"
_TRACE: Final = "trace"
_REMOTE: Final = (
    "with explicit also remote_control: [model-repository]; add restrictions if not all clients are trusted"
)
_LOOP: Final = "one event loop reads all connections of a process; ingress_processes sets their number"
_BALANCER: Final = (
    "give each server ports of its own behind a balancer, or let one server have several ingress_processes"
)
_PLATFORM: Final = "route its requests to the HTTP port by a proxy"
_NO_PLATFORM: Final = "there is no such endpoint"
_PINGS: Final = (
    "pings are answered at once, floods of them are refused, and idle_timeout_s closes what is idle"
)
_NO_BACKENDS: Final = "models run in Python processes, and no shared library is searched"
_MEMORY: Final = "device memory is allocated by the libraries that use it; none is pooled"
_METRICS: Final = "available metrics are always enabled, and read at each request for /metrics"

#: In the order of ``tritonserver --help``.
# fmt: off
FLAGS: Final = (
    _setting("id", _TEXT, "name"),
    _setting("exit-timeout-secs", _INTEGER, "drain_timeout_s"),
    _setting("log-verbose", FlagKind.LEVEL, "log.verbose_level"),
    _setting("log-info", _BOOLEAN, "log.info"),
    _setting("log-warning", _BOOLEAN, "log.warning"),
    _setting("log-error", _BOOLEAN, "log.error"),
    _setting("log-format", _TEXT, "log.time_format", words="default ISO8601"),
    _setting("log-file", _TEXT, "log.file"),
    _part("model-store", _TEXT, "the same as --model-repository", repeated=True),
    _part("model-repository", _TEXT, "the folder whose models are served", repeated=True),
    _setting("exit-on-error", _BOOLEAN, "exit_on_error"),
    _ineffective("disable-auto-complete-config", FlagKind.BARE,
        "config.pbtxt takes precedence either way, and only missing values are completed"),
    _part("strict-readiness", _BOOLEAN, "min_ready_instances: 1, or 0 where it is false"),
    _setting("model-control-mode", _TEXT, "model_control", words="none poll explicit", more=_REMOTE),
    _setting("repository-poll-secs", _INTEGER, "repository_poll_s"),
    _part("load-model", _TEXT,
        "load_at_start, of mode explicit alone; * is every model, and alone", repeated=True),
    _refused("model-config-name", _TEXT, "copy that file to the config.pbtxt of its model"),
    _ineffective("model-load-thread-count", _INTEGER,
        "all models load side by side, each in its own processes"),
    _ineffective("model-load-retry-count", _INTEGER,
        "a failed load is retried at the next request to load the model"),
    _refused("model-namespacing", _BOOLEAN, "give models names that differ, or servers of their own"),
    _ineffective("enable-peer-access", _BOOLEAN, "the libraries of the models decide that"),
    _part("allow-http", _BOOLEAN, "http_port: null where it is false"),
    _setting("http-address", _TEXT, "host", more="of gRPC too, unless it has its own"),
    _part("http-port", _INTEGER, "http_port"),
    _refused("reuse-http-port", _BOOLEAN, _BALANCER),
    _setting("http-header-forward-pattern", _TEXT, "http_header_forward_pattern"),
    _ineffective("http-thread-count", _INTEGER, _LOOP),
    _part("http-restricted-api", _TEXT, _RULES, repeated=True),
    _part("allow-grpc", _BOOLEAN, "grpc_port: null where it is false"),
    _setting("grpc-address", _TEXT, "grpc_host"),
    _part("grpc-port", _INTEGER, "grpc_port"),
    _refused("reuse-grpc-port", _BOOLEAN, _BALANCER),
    _setting("grpc-header-forward-pattern", _TEXT, "grpc_header_forward_pattern"),
    _ineffective("grpc-infer-allocation-pool-size", _INTEGER,
        "the memory of requests is reused automatically"),
    _part("grpc-use-ssl", _BOOLEAN, _TLS),
    _part("grpc-use-ssl-mutual", _BOOLEAN, _TLS),
    _part("grpc-server-cert", _TEXT, _TLS),
    _part("grpc-server-key", _TEXT, _TLS),
    _part("grpc-root-cert", _TEXT, _TLS),
    _setting("grpc-infer-response-compression-level", _TEXT,
        "grpc_response_compression", words="none low medium high"),
    _ineffective("grpc-keepalive-time", _INTEGER, _PINGS),
    _ineffective("grpc-keepalive-timeout", _INTEGER, _PINGS),
    _ineffective("grpc-keepalive-permit-without-calls", _BOOLEAN, _PINGS),
    _ineffective("grpc-http2-max-pings-without-data", _INTEGER, _PINGS),
    _ineffective("grpc-http2-min-recv-ping-interval-without-data", _INTEGER, _PINGS),
    _ineffective("grpc-http2-max-ping-strikes", _INTEGER, _PINGS),
    _part("grpc-max-connection-age", _INTEGER, "max_connection_age_s, of HTTP as well; here in milliseconds"),
    _ineffective("grpc-max-connection-age-grace", _INTEGER,
        "a connection over its age limit finishes its requests"),
    _part("grpc-restricted-protocol", _TEXT, _RULES, repeated=True),
    _refused("allow-sagemaker", _BOOLEAN, _PLATFORM),
    _ineffective("sagemaker-port", _INTEGER, _NO_PLATFORM),
    _ineffective("sagemaker-safe-port-range", _TEXT, _NO_PLATFORM),
    _ineffective("sagemaker-thread-count", _INTEGER, _NO_PLATFORM),
    _refused("allow-vertex-ai", _BOOLEAN, _PLATFORM),
    _ineffective("vertex-ai-port", _INTEGER, _NO_PLATFORM),
    _ineffective("vertex-ai-thread-count", _INTEGER, _NO_PLATFORM),
    _ineffective("vertex-ai-default-model", _TEXT, _NO_PLATFORM),
    _part("allow-metrics", _BOOLEAN, "metrics_port: null where it is false"),
    _ineffective("allow-gpu-metrics", _BOOLEAN, _METRICS),
    _ineffective("allow-cpu-metrics", _BOOLEAN, _METRICS),
    _setting("metrics-address", _TEXT, "metrics_host"),
    _part("metrics-port", _INTEGER, "metrics_port"),
    _ineffective("metrics-interval-ms", _NUMBER, _METRICS),
    _part("metrics-config", _TEXT,
        "summary_latencies=true is metrics_summaries; other settings make no difference: counters are always "
        "there", repeated=True),
    _part("trace-config", _TEXT, _TRACE, repeated=True),
    _ineffective("backend-directory", _TEXT, _NO_BACKENDS),
    _ineffective("backend-config", _TEXT,
        "workers' memory grows by itself; what a model needs is in its config.pbtxt", repeated=True),
    _ineffective("repoagent-directory", _TEXT, _NO_BACKENDS),
    _part("cache-config", _TEXT,
        "local,size=… is response_cache_nbytes; other caches are refused", repeated=True),
    _ineffective("cache-directory", _TEXT, "responses are cached in the server's own memory"),
    _setting("rate-limit", _TEXT, "rate_limit", words="execution_count off"),
    _setting("rate-limit-resource", _TEXT, "rate_limit_resources", repeated=True),
    _ineffective("pinned-memory-pool-byte-size", _INTEGER,
        "shared memory is page-locked as it is used; gpu_locked_nbytes bounds it"),
    _ineffective("cuda-memory-pool-byte-size", _TEXT, _MEMORY, repeated=True),
    _ineffective("cuda-virtual-address-size", _TEXT, _MEMORY, repeated=True),
    _ineffective("min-supported-compute-capability", _NUMBER,
        "a model whose library cannot use its GPU reports that when it is loaded"),
    _ineffective("buffer-manager-thread-count", _INTEGER,
        "tensors are gathered by the front, in shared memory"),
    _ineffective("host-policy", _TEXT,
        "workers of a GPU keep to the CPUs and the memory next to it (numa_affinity)", repeated=True),
    _refused("model-load-gpu-limit", _TEXT, "give models of one GPU what fits into it", repeated=True),
    _ineffective("strict-model-config", _BOOLEAN,
        "config.pbtxt takes precedence either way, and only missing values are completed"),
    _part("response-cache-byte-size", _INTEGER, "response_cache_nbytes"),
    _part("trace-file", _TEXT, _TRACE),
    _part("trace-level", _TEXT, _TRACE, repeated=True),
    _part("trace-rate", _INTEGER, _TRACE),
    _part("trace-count", _INTEGER, _TRACE),
    _part("trace-log-frequency", _INTEGER, _TRACE),
)
# fmt: on
BY_NAME: Final = {flag.name: flag for flag in FLAGS}
