"""A front process put together, and what happens to it between its start and its end."""
