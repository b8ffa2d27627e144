"""``gpuserve bench``: a load generator for any server of the Open Inference Protocol v2, and its reports.

A process that loads (``python -m gpuserve.cli.bench.loader_process``) imports nothing that only reports need.
No part of the server is imported here: what is measured is on the other side of a socket.
"""
