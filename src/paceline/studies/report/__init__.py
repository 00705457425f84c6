"""From the records of runs to one page: what was compared, what came out, and how sure that is."""
