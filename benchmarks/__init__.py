"""Measurements; `README.md` says which and what they mean."""
