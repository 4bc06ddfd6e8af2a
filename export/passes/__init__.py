"""Graph transforms, one a file."""
