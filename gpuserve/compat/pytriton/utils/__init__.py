"""Of PyTriton's utilities, those that programs use."""
