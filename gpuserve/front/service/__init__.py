"""What the endpoints offer, whichever protocol asks: inference, models, health, control."""
