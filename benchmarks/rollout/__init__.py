"""Rollouts without a cluster: real servers under load, replaced as a kubelet and its controllers do it.

``scripts/rollout`` runs it; its report is ``docs/rollout_report.md``. Who knows what; what is on the left has
no clock, process or socket::

    manifest.py      the YAML, as a pod needs it           release.py         YAML by gpuserve export, kubectl
    probes.py        results of probes, thresholds         probing.py         asks what a probe asks
    pod.py           one pod: states, probes, its end      node.py            its processes, signals, timers
                                                           container.py       ends with who started it
                                                           container_files.py its files, its environment
    deployment.py    which pods come and go, and when      cluster.py         lets them, keeps the endpoints
    endpoints.py     who hears of a pod, and how late      scenarios.py       what is done to the pods
    journal.py       what happened to pods                 load.py            requests that come when due
    outcomes.py      what became of requests               clients.py         which there are: grpc_client.py,
    served_requests  what is asked of served/                                 http_client.py
    report.py        the report, as Markdown               envoy.py           the real Envoy
                                                           run.py             one run, of all of these
                                                           __main__.py        the command line
"""
