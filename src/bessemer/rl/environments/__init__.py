"""Environments of multi-turn RL: base.py has the protocol, every other file registers one environment."""
