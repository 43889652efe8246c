"""Our names and theirs: parameters and configs of public implementations, both ways."""
