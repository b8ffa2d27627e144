"""The worker at work: it loads its callable, receives batches, runs them and answers."""
