"""The server's own models: loaded, unloaded, resized, and what a client or operator may ask of that."""
