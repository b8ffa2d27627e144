"""The supervisor of a server: owner of the listeners, the front and the workers; it runs no user code."""
