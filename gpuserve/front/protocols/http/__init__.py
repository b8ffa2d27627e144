"""The HTTP API: request handlers and codecs of the v2 protocol, and the pages for browsers."""
