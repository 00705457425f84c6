"""Many runs: planned, done, compared, drawn."""
