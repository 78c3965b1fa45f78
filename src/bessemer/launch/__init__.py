"""Starts runs of several processes: job files for clusters, and one process per GPU on this machine."""
