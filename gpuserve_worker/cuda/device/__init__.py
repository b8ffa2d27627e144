"""One CUDA device of a worker: the runtime, arrays over its memory, and caches of device and host memory."""
