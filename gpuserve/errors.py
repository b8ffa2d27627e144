"""Public import path of the errors of gpuserve (``gpuserve/core/errors.py``)."""

from __future__ import annotations

from gpuserve.core.errors import (
    AlreadyExists,
    AttachError,
    BadModelConfig,
    BindError,
    Cancelled,
    Code,
    ConfigError,
    ControlError,
    DeadlineExceeded,
    DeviceError,
    DuplicateModel,
    GpuserveError,
    Internal,
    InvalidArgument,
    ModelLoadError,
    ModelUnrecoverable,
    NoMemory,
    NotFound,
    PermissionDenied,
    QueueFull,
    RateLimited,
    RequestError,
    ResourceExhausted,
    StartupError,
    Stopping,
    Unavailable,
    Unimplemented,
    Unknown,
    inner_code,
    request_error,
)
from gpuserve_worker.inference.failure import UnrecoverableError

__all__ = [
    "AlreadyExists", "AttachError", "BadModelConfig", "BindError", "Cancelled", "Code", "ConfigError",
    "ControlError", "DeadlineExceeded", "DeviceError", "DuplicateModel", "GpuserveError", "Internal",
    "InvalidArgument", "ModelLoadError", "ModelUnrecoverable", "NoMemory", "NotFound", "PermissionDenied",
    "QueueFull", "RateLimited", "RequestError", "ResourceExhausted", "StartupError", "Stopping",
    "Unavailable", "Unimplemented", "Unknown", "UnrecoverableError", "inner_code", "request_error",
]  # fmt: skip
