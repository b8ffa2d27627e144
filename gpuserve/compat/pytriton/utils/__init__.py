"""PyTriton's utilities, as far as programs use them."""
