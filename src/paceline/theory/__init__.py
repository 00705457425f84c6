"""The command `paceline theory`: what paceline.control computes, as numbers, pictures and a page."""
