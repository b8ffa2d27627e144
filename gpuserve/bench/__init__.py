"""``gpuserve bench``: a load generator for any server of the Open Inference Protocol v2, and its reports.

::

    levels, arrivals, plan        what load is wanted                                        pure
    target, inputs, payloads      what a request is: its bytes are made once                 pure
    control, regions              metadata, statistics and shared memory, before and after   shell
    calls, http2_calls, http1_calls   the protocol of a connection: bytes in, bytes out      pure
    load, samples                 which call is sent when; what became of the calls          pure
    connection, timer, worker     sockets, the clock, the process that loads                 shell
    fleet, session                the processes that load, driven level by level             shell
    latencies, stability, server_time, results   samples into figures                        pure
    report, compare, output       a report: kept, compared, written                          pure

A process that loads (``python -m gpuserve.bench.worker``) imports nothing that only reports need. No part of
the server is imported here: what is measured is on the other side of a socket.
"""
