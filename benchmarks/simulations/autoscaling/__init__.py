"""The HorizontalPodAutoscaler of Kubernetes on ``gpuserve_saturation``, simulated: which target and windows.

``python -m benchmarks.simulations.autoscaling`` prints the tables of ``docs/autoscaling.md``. Nothing is
started and no cluster is asked. Who knows what::

    controller.py  the autoscaler: from what pods say to how many there are to be
    service.py     what a pod can do, from measured times, and what it says of itself at a load
    traffic.py     how many requests come in each second
    fleet.py       pods that start, serve and go
    run.py         the three together, and what came of it
    grid.py        the settings that are compared, and which of them is taken
    tables.py      Markdown                pictures.py    the pictures
    __main__.py    the command
"""
