"""The flags of Triton's ``tritonserver`` for ``gpuserve tritonserver``, and for PyTriton's options, which are
the same: a command line in, settings out.
"""
