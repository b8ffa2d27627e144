"""The scheduler of a model: queues, batch formation, sequences, rate limits. Pure: no clock and no I/O."""
