"""``gpuserve tune``: a search over the settings of a model for the highest throughput under a latency limit.

::

    settings_search   settings that may change, the latency limit, and the order of trials    pure
    tuning            a server for each trial, and its measurement by ``gpuserve.bench``      I/O
    tune_output       trials and results on a terminal; the config file with the best values
"""
