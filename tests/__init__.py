"""Tests. This folder is a package, because verl's wheel installs another package of this name."""
