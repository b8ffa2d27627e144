"""What processes of a server say to one another: messages, addresses, and the sockets they travel on."""
