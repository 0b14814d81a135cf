"""The leases in Django's admin: to look at, and to end a hold whose holder does not."""

from __future__ import annotations

from typing import Any

from django.contrib import admin, messages
from django.contrib.admin import helpers
from django.contrib.auth import get_permission_codename
from django.http import HttpRequest
from django.template.response import TemplateResponse

from pglease.contrib.django import pglease
from pglease.contrib.django.conf import conf
from pglease.contrib.django.models import EXPIRED, HELD, RELEASED, Lease, LeaseQuerySet
from pglease.errors import BackendError

HOLD = "hold"
"""The form's field with a token and a name."""


class StateFilter(admin.SimpleListFilter):
    """By state."""

    title = "state"
    parameter_name = "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:  # noqa: ARG002
        """Return the states."""
        return [(state, state) for state in (HELD, EXPIRED, RELEASED)]

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:  # noqa: ARG002
        """Return the rows of the state that was chosen."""
        return queryset.filter(state=self.value()) if self.value() else queryset


class LeaseAdmin(admin.ModelAdmin):
    """Read-only. Whoever may delete leases may end holds by force, but nobody can delete a row, and its token with it.

    What is ended is the hold that the operator saw: its fencing token goes through the page that asks for confirmation,
    so a successor that came meanwhile is left alone.
    """

    list_display = ("task_name", "state", "owner_id", "fencing_token", "acquired_at", "heartbeat_at", "expires_at")
    list_filter = (StateFilter,)
    search_fields = ("task_name", "owner_id")
    ordering = ("task_name",)
    readonly_fields = ("state",)
    actions = ("force_release",)
    show_full_result_count = False

    def get_queryset(self, request: HttpRequest) -> LeaseQuerySet:
        """Return the rows with their state."""
        rows: LeaseQuerySet = super().get_queryset(request)
        return rows.with_state()

    @admin.display(ordering="expires_at")
    def state(self, lease: Any) -> str:
        """Return the state, by the database's clock."""
        return str(lease.state)

    def has_add_permission(self, request: HttpRequest) -> bool:  # noqa: ARG002
        """Nobody: leases are acquired."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:  # noqa: ARG002
        """Nobody."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:  # noqa: ARG002
        """Nobody: `cleanup_expired` deletes rows, and keeps what their tokens stand for."""
        return False

    def has_force_release_permission(self, request: HttpRequest) -> bool:
        """Whoever has Django's permission to delete leases."""
        permission = get_permission_codename("delete", self.opts)
        return bool(request.user.has_perm(f"{self.opts.app_label}.{permission}"))

    @admin.action(description="Force release", permissions=["force_release"])
    def force_release(self, request: HttpRequest, queryset: LeaseQuerySet) -> TemplateResponse | None:
        """Ask for confirmation, then end each hold that was shown there and is still current."""
        if HOLD in request.POST:
            self._force(request, queryset)
            return None
        held = list(queryset.filter(state=HELD))
        if not held:
            self.message_user(request, "None of these is held.", messages.WARNING)
            return None
        context = {
            **self.admin_site.each_context(request),
            "title": "Force release",
            "leases": held,
            "opts": self.opts,
            "media": self.media,
            "field": HOLD,
            "action_checkbox_name": helpers.ACTION_CHECKBOX_NAME,
        }
        request.current_app = self.admin_site.name
        return TemplateResponse(request, "admin/pglease/lease/force_release.html", context)

    def _force(self, request: HttpRequest, queryset: LeaseQuerySet) -> None:
        chosen = {lease.task_name: lease for lease in queryset}
        for hold in request.POST.getlist(HOLD):
            token, _, name = hold.partition(":")
            if name in chosen and token.isdecimal():
                self._force_one(request, chosen[name], int(token))

    def _force_one(self, request: HttpRequest, lease: Any, token: int) -> None:
        name = lease.task_name
        try:
            ended = pglease.force_release(name, token)
        except BackendError as trouble:
            self.message_user(request, f"Nothing is known of {name!r}: {trouble}", messages.ERROR)
            return
        if ended:
            self.log_change(request, lease, f"Force released the hold with token {token}.")
            self.message_user(request, f"The hold of {name!r} with token {token} was ended.", messages.SUCCESS)
        else:
            text = f"Nothing was changed: {name!r} is not held under token {token} any more."
            self.message_user(request, text, messages.WARNING)


if conf().in_the_database:
    admin.site.register(Lease, LeaseAdmin)
