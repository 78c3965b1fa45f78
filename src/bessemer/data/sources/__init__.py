"""Where text comes from: files, directories, globs, object stores and registered datasets."""
