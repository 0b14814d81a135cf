"""What helps to test a backend, or code that uses leases: the contract suite, the model, a clock that stands still."""
