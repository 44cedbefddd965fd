"""Environments: users' code that answers the policy's turns, in worker processes."""
