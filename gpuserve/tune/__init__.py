"""``gpuserve tune``: searches the settings of a model for the highest throughput under a latency limit.

::

    axes             what may be changed, and to which values                   pure
    search           the latency limit, and which settings are tried next       pure
    yaml_edit        the best settings in the text of the config                pure
    trial_server     a server with the settings of a trial                      shell
    tuning, view     trial after trial, and how they are shown                  shell

Servers are measured by ``gpuserve.bench``.
"""
