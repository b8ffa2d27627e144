"""Which requests Envoy repeats, and when. It has no time limits: those are the client's and the server's."""

from __future__ import annotations

from typing import Any, Final

from gpuserve.export.envoy.proxy import Proxy
from gpuserve.export.reasoned import Reasoned

#: Compute an answer from a request and nothing else. Control operations have other paths.
_GRPC_OF_MODELS: Final = "/inference.GRPCInferenceService/Model"
_HTTP_INFERENCE: Final = "/v2/models/[^/]+(/versions/[^/]+)?/(infer|generate|generate_stream)"
_PREVIOUS_HOSTS: Final = {
    "name": "envoy.retry_host_predicates.previous_hosts",
    "typed_config": {
        "@type": "type.googleapis.com/envoy.extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate"
    },
}


def route_config(proxy: Proxy, cluster: str) -> dict[str, Any]:
    """The same for every listener: a pod answers both protocols on each port (with grpc.aio not on all)."""
    host = {
        "name": cluster,
        "domains": ["*"],
        "include_attempt_count_in_response": Reasoned(
            True, "x-envoy-attempt-count: a client sees whether its request was repeated."
        ),
        "request_body_buffer_limit": proxy.repeated,
        "retry_policy": Reasoned(_REPEAT, _REPEAT_WHY),
        "routes": [
            Reasoned(_NO_ADMIN, _NO_ADMIN_WHY),
            Reasoned(_inference(proxy, cluster, {"prefix": _GRPC_OF_MODELS}), _TIMEOUT_WHY),
            _inference(proxy, cluster, {"safe_regex": {"regex": _HTTP_INFERENCE}}),
            _route(cluster, {"prefix": "/", "headers": [_IS_GET]}),
            Reasoned(_route(cluster, {"prefix": "/"}, retry_policy=_REPEAT_UNSEEN), _UNSEEN_WHY),
        ],
    }
    return {"name": cluster, "virtual_hosts": [host]}


def _inference(proxy: Proxy, cluster: str, match: dict[str, Any]) -> dict[str, Any]:
    """gRPC does not say in its path which model is asked: one that may not run again is enough for all."""
    if proxy.runs_again:
        return _route(cluster, match)
    return _route(cluster, match, retry_policy=Reasoned(_REPEAT_UNSEEN, _ONCE_WHY))


def _route(cluster: str, match: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"match": match, "route": {"cluster": cluster, "timeout": "0s", **more}}


_NO_ADMIN: Final = {
    "match": {"prefix": "/v2/admin/"},
    "direct_response": {"status": 404, "body": {"inline_string": "Not Found"}},
}
_NO_ADMIN_WHY: Final = "The admin API is about one pod, and nobody could tell which: it is not passed on."
_REPEAT_WHY: Final = (
    "Inference is repeated also when a pod dies with it: a pod has no memory of it. Requests of a sequence "
    "belong into one stream, which stays with its pod. A stream that has had an answer, or whose client has "
    "not closed its side, is not repeated: it is reset, or ends with UNAVAILABLE."
)
_TIMEOUT_WHY: Final = (
    "No time limits here: the server keeps to grpc-timeout and timeout, which pass as they came."
)
_ONCE_WHY: Final = (
    "A model has retry_on_worker_death: false, so inference is sent again only where no pod has seen it."
)
_UNSEEN_WHY: Final = "What changes something in a pod is sent again only where the pod has not seen it."
_IS_GET: Final = {"name": ":method", "string_match": {"exact": "GET"}}
_CHOICES: Final = 30
_ELSEWHERE: Final = {
    "num_retries": 3,
    "retry_host_predicate": [_PREVIOUS_HOSTS],
    "host_selection_retry_max_attempts": Reasoned(
        _CHOICES,
        "A dead pod has the fewest requests, so of two pods it is chosen three times in four: that all 31 "
        "choices come to it happens once in 7000 repeats, and there are three.",
    ),
    "retry_back_off": {"base_interval": "0.025s", "max_interval": "0.25s"},
}
_REPEAT: Final = {
    "retry_on": Reasoned(
        "reset,unavailable,retriable-status-codes",
        "The connection is refused or lost before an answer; UNAVAILABLE and 503: a queue is full, a pod "
        "ends, a worker was lost. Errors of models (500, INTERNAL) are answers.",
    ),
    "retriable_status_codes": [503],
    **_ELSEWHERE,
}
_REPEAT_UNSEEN: Final = {
    "retry_on": "connect-failure,refused-stream,reset-before-request",
    **_ELSEWHERE,
    "host_selection_retry_max_attempts": _CHOICES,
}
