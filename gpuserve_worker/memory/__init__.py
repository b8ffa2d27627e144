"""Memory that a worker shares: arenas, clients' regions, inputs read from it and outputs written to it."""
