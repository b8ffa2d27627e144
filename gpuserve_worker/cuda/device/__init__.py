"""One CUDA device as a worker uses it: the runtime, arrays over its memory, and the memory that is kept."""
