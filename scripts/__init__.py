"""Programs of this checkout. This is a regular package, because verl's wheel installs another `scripts`."""
