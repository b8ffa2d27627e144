"""The stand-in for cuda-python, as far as tritonclient uses it for clients' regions of device memory."""
