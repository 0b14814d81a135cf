"""`manage.py pglease` and `manage.py pglease_migrate`."""
