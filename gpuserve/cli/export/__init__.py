"""From the configuration that ``gpuserve serve`` runs to the manifests of a cluster. ``config_bundle`` reads
files and ``rendering`` writes them; everything else is pure. No cluster and no GPU is queried.
"""
