"""Parts that every room can use: state tables and the event log."""
