"""The cluster file: its model, its strict reading, and everything derived from it. `load.py` alone does I/O."""
