"""The report's table."""

from django.db import migrations, models


class Migration(migrations.Migration):
    """Made by makemigrations."""

    initial = True
    operations = [
        migrations.CreateModel(
            name="Report",
            fields=[
                ("name", models.TextField(primary_key=True, serialize=False)),
                ("body", models.TextField()),
                ("written_under", models.BigIntegerField(help_text="the fencing token of whoever wrote it")),
            ],
        )
    ]
