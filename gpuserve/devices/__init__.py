"""The GPUs of this machine: discovery, names, and placement of workers. CUDA is never loaded: the supervisor
uses no GPU, and its child processes choose their GPU before they load CUDA.
"""
