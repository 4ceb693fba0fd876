"""How a run is watched from outside: metrics, experiment trackers, traces.

Invariant: nothing in here decides anything, and nothing that goes wrong in here stops or changes a
run. What is off is not imported and costs a call that returns at once.
"""
