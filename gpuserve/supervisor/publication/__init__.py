"""What happens in a server told to whoever subscribes to it: events, samples, lines of the log."""
