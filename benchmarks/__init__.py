"""What pglease costs above the bare driver. Run by `make bench`."""
