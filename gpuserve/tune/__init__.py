"""``gpuserve tune``: searches the settings of a model for the highest throughput under a latency limit.

::

    limits, axes      what is wanted, and what may be changed        pure
    search, pareto    which settings are tried next; which are best  pure
    yaml_edit         the best settings in the text of the config    pure
    trial_server      a server with the settings of a trial          shell
    tuning, view      trial after trial; what is seen of it          shell

Servers are measured by ``gpuserve.bench``.
"""
