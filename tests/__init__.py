"""The test suite; a package, so that its builders import the same way everywhere."""
