"""Envoy in front of the pods: balances single requests, and repeats those that a dying pod has lost.

Pure, as all of ``export``.

=============  ==================================================================================
``proxy``      what Envoy is to be: where it listens, where the pods are
``bootstrap``  its configuration as a whole; files of it
``listeners``  its ports: for clients with the routes, for the node and Prometheus
``clusters``   the pods: balancing, health, ejection
``tls``        certificates, on both sides
``pods``       Envoy in a cluster, as a kustomize component
=============  ==================================================================================
"""
