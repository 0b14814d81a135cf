"""What the report is kept in."""

from django.db import models


class Report(models.Model):
    """One report a name."""

    name = models.TextField(primary_key=True)
    body = models.TextField()
    written_under = models.BigIntegerField(help_text="the fencing token of whoever wrote it")
