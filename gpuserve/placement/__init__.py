"""From declared models to models on devices: what is found on this machine decides."""
