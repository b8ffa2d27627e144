"""The worker process of gpuserve: one inference callable instance, and its IPC protocol.

This package is the lowest layer of the project. Its modules import numpy, msgpack and the standard library,
and nothing from ``gpuserve``. A test checks this, and that a starting worker imports neither grpc nor zmq nor
asyncio.
"""
