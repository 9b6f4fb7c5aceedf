"""Starts the ranks of a job on this machine and starts them again when one is lost.

Runs in a process of its own, which has no part in training: `cli` reads the options, `spec` is the plan they make,
`decide` says what to do about an exit, `supervisor` does it, `process` is one rank, `console` is what people see.
"""
