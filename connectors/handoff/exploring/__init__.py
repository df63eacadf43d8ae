"""Small joint models of P, D and the network between them, and the search that visits every state of each.

A model drives the very ledgers the connectors drive. What it adds is the world: one-sided operations that land
when they like, vLLM on both sides, crashes, and a network in which whatever was once sent may arrive at any later
time, any number of times, in any order, or never.
"""
