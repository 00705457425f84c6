"""Rivals to compare with, one file each. Nothing of `PACE` depends on them."""
