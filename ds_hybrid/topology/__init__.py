"""What the machines look like, and which ranks form groups. Pure, but for the last three, which look at this machine.

hostfile     DeepSpeed's hostfile, checked
links        the kinds of link between two ranks, and what is known of their speed
nvidia_smi   the text of ``nvidia-smi topo -m`` -> link table
islands      links and NUMA nodes of one host -> islands
cluster      Cluster: hosts, devices, links and islands of all ranks; what everything above reads
description  a Cluster as YAML or JSON, which ``ds_hybrid.topology.source`` may name
packing      things that are near each other, put together
layout       sizes and Cluster -> the ranks of the TP, DP, EP and EDP groups, with the reasons
this_host    a key that tells this host from others, and its NUMA nodes
gpus         the GPUs of this host and their links, as NVML or nvidia-smi tell
probe        the running ranks -> Cluster
"""
