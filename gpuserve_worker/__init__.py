"""The worker process of gpuserve: one inference callable instance, and the wire it speaks.

This package is the leaf of the project. It imports numpy, msgpack and the standard library, and
nothing from ``gpuserve``; a test holds it to that, and to never pulling in grpc, zmq or asyncio.
"""
