"""``gpuserve top``: a running server on one screen."""
