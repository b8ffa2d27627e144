"""The protocol: codecs, one service layer, and the servers that carry it."""
