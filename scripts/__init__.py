"""Programs of this checkout. A regular package, because verl's wheel installs another one that is called `scripts`."""
