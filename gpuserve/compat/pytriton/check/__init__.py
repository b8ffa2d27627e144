"""Of PyTriton's self-checks, what its users' tests import."""
