"""Programs of this checkout: a regular package, because verl's wheel installs another `scripts`."""
