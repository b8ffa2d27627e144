"""Other projects' names for what gpuserve does. Maps only: nothing of a server is decided here."""
