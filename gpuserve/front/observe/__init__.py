"""What a front counts and shows: metrics, traces, the health of GPUs."""
