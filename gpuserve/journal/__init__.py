"""What happens in a server, as plain data: the kinds of events, one event, the last ones of them."""
