"""The GPU support of workers with a GPU, which alone import it; ``device/runtime.py`` imports cupy."""
