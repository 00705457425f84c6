"""The study behind the defaults of PACE: many named runs, one line of records each, and what they say."""
