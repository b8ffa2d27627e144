"""The server of the endpoint: HTTP/1.1 and HTTP/2 in the front's own event loop.

``connection`` is a socket; ``http1`` and ``http2`` are what is spoken on it; ``asgi_requests`` runs an ASGI
application for a request; ``transport`` listens. Nothing here knows a model.
"""
