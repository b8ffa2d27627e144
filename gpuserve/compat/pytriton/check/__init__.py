"""PyTriton's self-checks, as far as tests of its users import them."""
