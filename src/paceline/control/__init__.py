"""The theory: controllers, limiting errors and convergence bounds, in numpy and scipy only.

Empty in this release. The package exists so that its one promise, never importing torch, is kept from
the start.
"""
