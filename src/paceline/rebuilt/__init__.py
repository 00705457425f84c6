"""The optimizer rebuilt: it takes the place of `paceline.optim` as soon as engine and integrations use it.

Read settings.py and rule.py first. Nothing outside this package imports it yet.
"""
