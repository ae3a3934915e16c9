"""Is this machine, and every host of a hostfile, ready to train? What ``ds_hybrid doctor`` runs.

examination  the whole of it: asks, checks, draws up the Report
facts        HostFacts: what a host tells of itself
collect      the facts of the host that it runs on; ``python -m ds_hybrid.doctor.collect`` prints them
hosts        the facts of this host, and of others over ssh
env_files    DeepSpeed's .deepspeed_env: what reaches the ranks on other hosts
checks       facts -> findings (pure)
groups       facts and sizes -> Cluster and Layout (pure)
collective   two ranks on this host exchange numbers; each runs ``rank``
locks        the lock files of torch's extension builds
processes    programs run side by side, and ended with all that they started
findings     what is wrong, and how badly
text         the Report for people

Only ``collect`` and ``rank`` import torch and DeepSpeed, in processes of their own: a doctor must survive a torch that
does not load.
"""
