"""`paceline sweep`: many runs that differ in some settings."""
