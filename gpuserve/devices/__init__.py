"""The GPUs of this machine: what there is, and how it is named. CUDA is never touched: the supervisor has no
GPU, and its children choose theirs before they open CUDA.

::

    nvml, driver_files  ->  machine    what the driver has
                            visible    what CUDA_VISIBLE_DEVICES leaves of it: cuda:0, cuda:1, …
                            inventory  one look at all of that, in a thread that may hang
    names  ->  resolution              from the device that a model names to those that there are
               placement               what a worker process needs to see its GPU only, and to stay beside it
"""
