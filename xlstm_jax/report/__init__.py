"""The report of a run: one page that shows all that its folder tells."""
