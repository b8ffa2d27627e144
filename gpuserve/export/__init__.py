"""From the configuration that ``gpuserve serve`` runs to the manifests of a cluster. ``config_bundle`` reads
files and ``rendering`` writes them; everything else is pure. No cluster and no GPU is queried.

========================  ==========================================================================
``rendering``             a whole export: checked, computed, rendered, written
``export_options``        the options, and their checks
``pod_sizing``            every computed number with its reason, and ports
``config_bundle``         the files that a pod needs beside its config
``manifest_values``       the values of the templates' placeholders
``manifest_templates``    filled templates, and their text as YAML
``templates``             the templates
``envoy_proxy``           Envoy in front of the pods
========================  ==========================================================================
"""
