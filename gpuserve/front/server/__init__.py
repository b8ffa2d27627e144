"""The server of the endpoint: HTTP/1.1 and HTTP/2 in the front's own loop, without models or doors."""
