"""What the models and the machines are like: facts from config.json, the hardware catalogue. `load.py` alone
does I/O.
"""
