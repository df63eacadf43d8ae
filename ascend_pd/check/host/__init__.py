"""Probes of one host: gather facts first, judge them purely after. `gather.py` and `runner.py` alone do I/O."""
