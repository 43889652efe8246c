"""Sources of documents: one registry opens each kind of data set, for training and for `prepare`."""
