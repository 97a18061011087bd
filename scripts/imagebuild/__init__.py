"""Build, cache and check the container image; scripts/image.py is the command."""
