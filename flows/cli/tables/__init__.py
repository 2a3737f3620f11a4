"""The tables of commands; each module makes one family.

Invariant: nothing here decides anything; every number comes from the plan or the store.
"""
