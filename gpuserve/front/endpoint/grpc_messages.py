"""The replies of the small RPCs as protobuf messages: liveness, readiness, metadata, repository index.

Plain arguments in, messages out. Inference is in ``grpc_requests`` and ``grpc_responses``;
what the answers are is the service's to decide.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tritonclient.grpc import service_pb2 as pb

from gpuserve.front.endpoint.v2 import IndexEntry
from gpuserve_worker.tensor import TensorSpec


def server_live(live: bool) -> Any:
    """A ``ServerLiveResponse``."""
    return pb.ServerLiveResponse(live=live)


def server_ready(ready: bool) -> Any:
    """A ``ServerReadyResponse``."""
    return pb.ServerReadyResponse(ready=ready)


def model_ready(ready: bool) -> Any:
    """A ``ModelReadyResponse``."""
    return pb.ModelReadyResponse(ready=ready)


def server_metadata(name: str, version: str, extensions: Iterable[str]) -> Any:
    """A ``ServerMetadataResponse``."""
    return pb.ServerMetadataResponse(name=name, version=version, extensions=extensions)


def model_metadata(
    name: str,
    versions: Iterable[str],
    platform: str,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    *,
    batches: bool,
) -> Any:
    """A ``ModelMetadataResponse``. Where the model batches, every shape gets -1 in front."""
    return pb.ModelMetadataResponse(
        name=name,
        versions=versions,
        platform=platform,
        inputs=[_tensor_metadata(tensor, batches) for tensor in inputs],
        outputs=[_tensor_metadata(tensor, batches) for tensor in outputs],
    )


def repository_index(entries: Iterable[IndexEntry]) -> Any:
    """A ``RepositoryIndexResponse``."""
    index = pb.RepositoryIndexResponse.ModelIndex
    return pb.RepositoryIndexResponse(models=[index(**entry._asdict()) for entry in entries])


def health(serving: bool) -> bytes:
    """A serialised ``grpc.health.v1.HealthCheckResponse``: field 1 is 1 (SERVING) or 2 (NOT_SERVING)."""
    return b"\x08\x01" if serving else b"\x08\x02"


def _tensor_metadata(tensor: TensorSpec, batches: bool) -> Any:
    shape = (-1, *tensor.shape) if batches else tensor.shape
    return pb.ModelMetadataResponse.TensorMetadata(name=tensor.name, datatype=tensor.datatype, shape=shape)
