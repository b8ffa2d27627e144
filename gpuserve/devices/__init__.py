"""The GPUs of this machine: discovery, names, and placement of workers. CUDA is never loaded: the supervisor
uses no GPU, and its child processes choose their GPU before they load CUDA.

::

    nvml                ->  machine    GPUs of the driver
                            inventory  GPUs that CUDA_VISIBLE_DEVICES leaves: cuda:0, cuda:1, …
    names               ->  inventory  from a device name in a declaration to the devices of the machine
                            placement  environment, CPUs and memory of a worker process
"""
