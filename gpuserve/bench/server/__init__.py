"""What is asked of a measured server beside the load, and the requests made for it."""
