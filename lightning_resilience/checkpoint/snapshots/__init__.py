"""Snapshots: the newest complete state of each rank, kept in shared memory, where the rank's successor finds it.

In the order a snapshot travels: ``pace`` (when), ``copies`` (how it gets there), ``file`` (where it lies), ``run``
and ``choice`` (whether a new start goes on from it), ``reader`` (how it gets back); ``engine`` puts them together.
"""
