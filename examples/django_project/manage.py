"""A Django project whose replicas migrate once, and of whose cron jobs one writes the report.

export DATABASE_URL=postgresql://me@db/app
python manage.py pglease_migrate --noinput      # on every replica: one migrates, the others wait
python manage.py report                         # on every host: one writes it, the others skip it
python manage.py pglease list
"""

import os
import sys

from django.core.management import execute_from_command_line

if __name__ == "__main__":
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "settings")
    execute_from_command_line(sys.argv)
