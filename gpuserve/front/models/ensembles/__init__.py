"""Models served as one: the steps of an ensemble, each a request to another model of this front. ``plan.py``
is pure: what there is to do, and how far a request has come. ``tensors.py`` says who holds what between the
steps, ``run.py`` runs one request, ``driver.py`` is the ensemble as a model.
"""
