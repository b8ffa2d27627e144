"""Models in the front: drivers, instances, requests, answers, ensembles, response cache, tracing."""
