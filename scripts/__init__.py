"""Programs of this checkout. This is a regular package because verl's wheel also installs a package named `scripts`."""
