"""Paceline inside the trainers people use: one module for each, imported on its own."""
