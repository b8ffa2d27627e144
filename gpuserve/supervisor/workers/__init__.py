"""Workers of the server: their monitors, watchdogs, threads, and the fences of lost GPUs."""
