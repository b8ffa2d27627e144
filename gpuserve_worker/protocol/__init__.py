"""The IPC protocol between a worker and its server: messages, their encoding, and the layout of tensors."""
