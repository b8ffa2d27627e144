"""The parts of a supervisor that know no model: processes, listeners, the front, the life of a server."""
