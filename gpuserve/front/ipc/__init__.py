"""The IPC with workers: sockets, arenas, device exports, and shared-memory regions of clients."""
