"""What CUDA can say no with: its status codes with their names and words, and which of them stay."""

from __future__ import annotations

from typing import Final

INVALID_VALUE: Final = 1
MEMORY_ALLOCATION: Final = 2
INITIALIZATION_ERROR: Final = 3
CUDART_UNLOADING: Final = 4
INSUFFICIENT_DRIVER: Final = 35
DEVICES_UNAVAILABLE: Final = 46
NO_DEVICE: Final = 100
INVALID_DEVICE: Final = 101
DEVICE_UNINITIALIZED: Final = 201
MAP_BUFFER_OBJECT_FAILED: Final = 205
PEER_ACCESS_UNSUPPORTED: Final = 217
INVALID_RESOURCE_HANDLE: Final = 400
ILLEGAL_STATE: Final = 401
NOT_FOUND: Final = 500
NOT_READY: Final = 600
ILLEGAL_ADDRESS: Final = 700
PEER_ACCESS_ALREADY_ENABLED: Final = 704
PEER_ACCESS_NOT_ENABLED: Final = 705
HOST_MEMORY_ALREADY_REGISTERED: Final = 712
HOST_MEMORY_NOT_REGISTERED: Final = 713
LAUNCH_FAILURE: Final = 719
NOT_PERMITTED: Final = 800
NOT_SUPPORTED: Final = 801
MPS_CLIENT_TERMINATED: Final = 810
STREAM_CAPTURE_UNSUPPORTED: Final = 900
STREAM_CAPTURE_INVALIDATED: Final = 901

#: status -> (name, words), as the runtime of CUDA has them.
WORDS: Final = {
    0: ("cudaSuccess", "no error"),
    1: ("cudaErrorInvalidValue", "invalid argument"),
    2: ("cudaErrorMemoryAllocation", "out of memory"),
    3: ("cudaErrorInitializationError", "initialization error"),
    4: ("cudaErrorCudartUnloading", "driver shutting down"),
    35: ("cudaErrorInsufficientDriver", "CUDA driver version is insufficient for CUDA runtime version"),
    46: ("cudaErrorDevicesUnavailable", "CUDA-capable device(s) is/are busy or unavailable"),
    100: ("cudaErrorNoDevice", "no CUDA-capable device is detected"),
    101: ("cudaErrorInvalidDevice", "invalid device ordinal"),
    201: ("cudaErrorDeviceUninitialized", "invalid device context"),
    205: ("cudaErrorMapBufferObjectFailed", "mapping of buffer object failed"),
    208: ("cudaErrorAlreadyMapped", "resource already mapped"),
    214: ("cudaErrorECCUncorrectable", "uncorrectable ECC error encountered"),
    217: ("cudaErrorPeerAccessUnsupported", "peer access is not supported between these two devices"),
    220: ("cudaErrorNvlinkUncorrectable", "uncorrectable NVLink error detected during the execution"),
    304: ("cudaErrorOperatingSystem", "OS call failed or operation not supported on this OS"),
    400: ("cudaErrorInvalidResourceHandle", "invalid resource handle"),
    401: (
        "cudaErrorIllegalState",
        "the operation cannot be performed in the present state",
    ),
    500: ("cudaErrorSymbolNotFound", "named symbol not found"),
    600: ("cudaErrorNotReady", "device not ready"),
    700: ("cudaErrorIllegalAddress", "an illegal memory access was encountered"),
    702: ("cudaErrorLaunchTimeout", "the launch timed out and was terminated"),
    704: ("cudaErrorPeerAccessAlreadyEnabled", "peer access is already enabled"),
    705: ("cudaErrorPeerAccessNotEnabled", "peer access has not been enabled"),
    709: ("cudaErrorContextIsDestroyed", "context is destroyed"),
    710: ("cudaErrorAssert", "device-side assert triggered"),
    712: (
        "cudaErrorHostMemoryAlreadyRegistered",
        "part or all of the requested memory range is already mapped",
    ),
    713: ("cudaErrorHostMemoryNotRegistered", "pointer does not correspond to a registered memory region"),
    714: ("cudaErrorHardwareStackError", "hardware stack error"),
    715: ("cudaErrorIllegalInstruction", "an illegal instruction was encountered"),
    716: ("cudaErrorMisalignedAddress", "misaligned address"),
    717: ("cudaErrorInvalidAddressSpace", "operation not supported on global/shared address space"),
    718: ("cudaErrorInvalidPc", "invalid program counter"),
    719: ("cudaErrorLaunchFailure", "unspecified launch failure"),
    800: ("cudaErrorNotPermitted", "operation not permitted"),
    801: ("cudaErrorNotSupported", "operation not supported"),
    802: ("cudaErrorSystemNotReady", "system not yet initialized"),
    803: (
        "cudaErrorSystemDriverMismatch",
        "system has unsupported display driver / cuda driver combination",
    ),
    900: ("cudaErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing"),
    901: (
        "cudaErrorStreamCaptureInvalidated",
        "operation failed due to a previous error during capture",
    ),
    805: (
        "cudaErrorMpsConnectionFailed",
        "MPS client failed to connect to the MPS control daemon or the MPS server",
    ),
    806: (
        "cudaErrorMpsRpcFailure",
        "the remote procedural call between the MPS server and the MPS client failed",
    ),
    807: ("cudaErrorMpsServerNotReady", "MPS server is not ready to accept new MPS client requests"),
    808: (
        "cudaErrorMpsMaxClientsReached",
        "the hardware resources required to create MPS client have been exhausted",
    ),
    809: (
        "cudaErrorMpsMaxConnectionsReached",
        "the hardware resources required to support device connections have been exhausted",
    ),
    810: ("cudaErrorMpsClientTerminated", "the MPS client has been terminated by the server"),
    999: ("cudaErrorUnknown", "unknown error"),
}


class CUDARuntimeError(RuntimeError):
    """A call that CUDA refused. ``status`` is its code; the text is ``name: words``."""

    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__("{}: {}".format(*WORDS.get(status, WORDS[999])))

    def __reduce__(self) -> tuple[type[CUDARuntimeError], tuple[int]]:
        return CUDARuntimeError, (self.status,)
