"""Envoy in front of the pods: balances single requests, and repeats those that a dying pod has lost.

Pure, as all of ``export``.

=============  ==================================================================================
``proxy``      what Envoy is to be: where it listens, where the pods are
``bootstrap``  its configuration, and the endpoints of its clusters
``pods``       Envoy in a cluster, as a kustomize component
=============  ==================================================================================
"""
