"""``gpuserve bench``: a load generator for any server of the Open Inference Protocol v2, and its reports.

::

    plan         what load is wanted                                                      pure
    server       what a request is, and what is asked of the server beside the load       both
    calls        connections, their protocols, and the processes that send requests       both
    preparation  options into requests as bytes                                           shell
    fleet, session   the processes that send requests, driven level by level              shell
    reports      samples into figures; a report kept, compared, written                   pure

A process that loads (``python -m gpuserve.bench.loader_process``) imports nothing that only reports need. No
part of the server is imported here: what is measured is on the other side of a socket.
"""
