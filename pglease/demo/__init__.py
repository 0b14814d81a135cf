"""The demo: three worker processes, one lease, one kill -9, one refused write: `pglease demo`, `make demo` plays it."""
