"""A door that is a process of its own: it has connections, and the front has everything else."""
