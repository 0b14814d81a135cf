"""The lease table."""

from django.db import migrations, models

from pglease.contrib.django.conf import conf
from pglease.contrib.django.operations import LeaseTable


class Migration(migrations.Migration):
    """The table by the package's SQL, which is also the first use's; for Django a model that it does not manage."""

    initial = True
    operations = [
        LeaseTable(
            state_operations=[
                migrations.CreateModel(
                    name="Lease",
                    fields=[
                        ("task_name", models.TextField(primary_key=True, serialize=False, verbose_name="name")),
                        ("owner_id", models.TextField(verbose_name="holder")),
                        ("fencing_token", models.BigIntegerField()),
                        ("acquired_at", models.DateTimeField()),
                        ("heartbeat_at", models.DateTimeField(verbose_name="renewed at")),
                        ("expires_at", models.DateTimeField()),
                        ("transitions", models.BigIntegerField()),
                        ("metadata", models.JSONField(null=True)),
                        ("lease_id", models.UUIDField(null=True, verbose_name="hold")),
                    ],
                    options={
                        "db_table": conf().db_table,
                        "default_permissions": ("view", "delete"),
                        "managed": False,
                    },
                )
            ]
        )
    ]
