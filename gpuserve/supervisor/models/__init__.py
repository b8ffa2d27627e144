"""The server's own models: load, unload, resize, and the requests of clients and operators for these."""
