"""The flags of Triton's ``tritonserver``, which are PyTriton's options as well, as settings."""
