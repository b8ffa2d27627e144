"""The GPUs of this machine as the front watches them: what NVML says (``nvml``, in the thread of
``monitor``), what follows from it (``health``, ``fleet``: pure), and who is told (``watch``). CUDA is never
touched here.
"""
