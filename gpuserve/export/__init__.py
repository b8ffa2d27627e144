"""From the configuration that ``gpuserve serve`` runs to the manifests of a cluster.

Pure: plain dicts and text are made of a ``Configuration`` and of ``ExportOptions``. Files are read in
``files`` and written in ``output``, and nowhere else. No cluster is asked, no GPU of this machine looked at.

===============  ==================================================================================
``sizing``       every computed number with its reason; options, ports, and files that pods need
``templates``    the manifests, with places to fill
``manifests``    what the places are filled with, and the text as YAML
``envoy``        what balances in front of the pods
``checks``       what cannot run in a cluster, told with the key that says so
``rendering``    a whole export: checked, computed, and as text by file name
===============  ==================================================================================
"""
