"""The front's ends of its workers: their sockets, and the memory that they answer from."""
