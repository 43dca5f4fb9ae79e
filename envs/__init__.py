"""Environments: the contract, the registry, response parsing, and the simulators, one folder each.

Knows neither tokens nor engines. Imports without torch, and without a simulator until one is made.
"""
