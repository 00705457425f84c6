"""PACE in other trainers. Each module needs the package it integrates with, and is imported by name."""
