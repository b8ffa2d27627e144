"""From the configuration that ``gpuserve serve`` runs to the manifests of a cluster.

Pure: plain dicts and text are made of a ``Configuration`` and of ``ExportOptions``. Files are read in
``files`` and written in ``output``, and nowhere else. No cluster is asked, no GPU of this machine looked at.

===============  ==================================================================================
``options``      what the command line says: image, name, the size of a node
``sizing``       every computed number, with its reason
``scaling``      how autoscalers scale, by a simulation
``reservation``  how many GPUs, and what the instances of them take
``checks``       what cannot run in a cluster, told with the key that says so; ``option_checks``: the flag
``findings``     one such thing, before it knows where its key stands
``pod``          the pod: container, probes, volumes; ``workload``: what runs it; ``network``: who reaches it
``pod_defaults`` the keys that have another default in a pod
``components``   what changes the base: surge, writable root, daemonset, keda, monitoring
``kserve``       ServingRuntime and InferenceService
``envoy``        what balances in front of the pods, a package
``alerts``       PrometheusRule; ``dashboard``: Grafana; both in the names of ``metric_names``
``yaml_text``    dicts as YAML, a ``Reasoned`` value with its reason as a comment
===============  ==================================================================================
"""
