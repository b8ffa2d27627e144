"""``gpuserve tune``: a search for a model's settings of highest throughput under a latency limit."""
