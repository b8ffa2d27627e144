"""Parts that every room can use: state tables, the event log, and the limit of turns."""
