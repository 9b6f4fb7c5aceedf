"""The command `lightning-resilience`: one file for each group of commands; torch is imported only by what needs it."""
