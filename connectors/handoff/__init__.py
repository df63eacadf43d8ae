"""The life cycle of a handoff: two transition tables, a ledger on each, and the explorer that checks them joined.

Pure: no I/O, clock or thread; `now` and fresh ids are arguments. Connectors drive `SourceLedger` and `SinkLedger`
under one lock each and carry out the actions they return.
"""
