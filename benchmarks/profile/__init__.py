"""What one small request costs in the front and in a worker, without a network server around them."""
