"""Faults made on purpose, for tests, drills and benchmarks. Nothing else imports this.

plan      what happens, to which rank, where in training
injector  a Lightning callback that makes it happen
"""
