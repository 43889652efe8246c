"""The report of a run: one HTML page with everything that its folder records."""
