"""The server of the endpoint: HTTP/1.1 and HTTP/2 in the front's own event loop.

``transport`` listens; ``http1`` and ``http2`` are what is spoken on a connection, whose socket is in
``front/exchange``. Nothing here knows a model or a door.
"""
