"""What the machines look like, and which ranks form groups. Everything here but the probe is pure.

hostfile     DeepSpeed's hostfile, checked
links        the kinds of link between two ranks, and what is known of their speed
nvidia_smi   the text of ``nvidia-smi topo -m`` -> link table
islands      links and NUMA nodes of one host -> islands
cluster      Cluster: hosts, devices, links and islands of all ranks; what everything above reads
description  a Cluster as YAML or JSON, which ``ds_hybrid.topology.source`` may name
layout       sizes and Cluster -> the ranks of the TP, DP, EP and EDP groups, with the reasons
"""
