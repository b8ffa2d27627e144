"""A config file that has changed while its server runs: what is different, what is done, how it ended."""
