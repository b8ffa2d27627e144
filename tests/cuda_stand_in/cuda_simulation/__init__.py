"""The machine with GPUs that the stand-ins for ``cupy`` and ``pynvml`` show. It is files in one directory, so
that all processes with ``CUDA_STAND_IN`` set to it see the same GPUs and each other's device memory.

Nothing here has the shape of a library's interface: that is what the packages beside it are for.
"""
