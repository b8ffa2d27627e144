"""The constants of ``cupy.cuda.runtime``."""

from typing import Final

is_hip: Final = False

memcpyHostToHost: Final = 0
memcpyHostToDevice: Final = 1
memcpyDeviceToHost: Final = 2
memcpyDeviceToDevice: Final = 3
memcpyDefault: Final = 4

memoryTypeUnregistered: Final = 0
memoryTypeHost: Final = 1
memoryTypeDevice: Final = 2
memoryTypeManaged: Final = 3

hostAllocDefault: Final = 0
hostAllocPortable: Final = 1
hostAllocMapped: Final = 2
hostAllocWriteCombined: Final = 4

streamDefault: Final = 0
streamNonBlocking: Final = 1
streamLegacy: Final = 1
streamPerThread: Final = 2

streamCaptureModeGlobal: Final = 0
streamCaptureModeThreadLocal: Final = 1
streamCaptureModeRelaxed: Final = 2

eventDefault: Final = 0
eventBlockingSync: Final = 1
eventDisableTiming: Final = 2
eventInterprocess: Final = 4

cudaIpcMemLazyEnablePeerAccess: Final = 1
cudaInvalidDeviceId: Final = -2
cudaCpuDeviceId: Final = -1

cudaDevAttrMaxThreadsPerBlock: Final = 1
cudaDevAttrGpuOverlap: Final = 15
cudaDevAttrMultiProcessorCount: Final = 16
cudaDevAttrIntegrated: Final = 18
cudaDevAttrCanMapHostMemory: Final = 19
cudaDevAttrConcurrentKernels: Final = 31
cudaDevAttrEccEnabled: Final = 32
cudaDevAttrPciBusId: Final = 33
cudaDevAttrPciDeviceId: Final = 34
cudaDevAttrAsyncEngineCount: Final = 40
cudaDevAttrUnifiedAddressing: Final = 41
cudaDevAttrPciDomainId: Final = 50
cudaDevAttrManagedMemory: Final = 83
cudaDevAttrHostNativeAtomicSupported: Final = 86
cudaDevAttrPageableMemoryAccess: Final = 88
cudaDevAttrConcurrentManagedAccess: Final = 89
cudaDevAttrCanUseHostPointerForRegisteredMem: Final = 91
cudaDevAttrHostRegisterSupported: Final = 99
cudaDevAttrPageableMemoryAccessUsesHostPageTables: Final = 100
cudaDevAttrHostRegisterReadOnlySupported: Final = 113
cudaDevAttrMemoryPoolsSupported: Final = 115
