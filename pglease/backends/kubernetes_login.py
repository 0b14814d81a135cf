"""Where the API server is, and who we are to it: kubeconfig, context, or the service account of a pod.

lightkube reads all of that. It is read again whenever the server no longer knows us: a token that was rotated in its
file, a new client certificate, a plugin that has to be asked anew.
"""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pglease.errors import BackendMisconfigured, MissingDependencyError

if TYPE_CHECKING:
    from lightkube.config.kubeconfig import KubeConfig

SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
DEFAULT_KUBECONFIG = "~/.kube/config"


@dataclass(frozen=True, slots=True)
class Login:
    """How to reach the API server.

    Attributes:
        server: its address.
        namespace: where we are unless told otherwise.
        tls: how to tell that it is the one; None for plain HTTP.
        authorization: the header that says who we are; None when a certificate says it, or nobody asks.
    """

    server: str
    namespace: str
    tls: ssl.SSLContext | None = field(repr=False)
    authorization: str | None = field(repr=False)


def require_lightkube() -> None:
    """Refuse to go on without the extra.

    Raises:
        MissingDependencyError: lightkube is not installed.
    """
    if find_spec("lightkube") is None:
        raise MissingDependencyError("Kubernetes needs the package lightkube: install the extra, pglease[kubernetes]")


def read_login(context: str | None = None, kubeconfig: str | None = None) -> Login:
    """Read who and where.

    Args:
        context: the kubeconfig's context; default: its current one.
        kubeconfig: the file; default: the pod's service account when we are in one and no context is asked for, else
            the first file that KUBECONFIG names, else ~/.kube/config.

    Raises:
        BackendMisconfigured: there is none, or it cannot be used. The text shows nothing of what is in it.
    """
    from lightkube.config.client_adapter import user_auth, verify_cluster
    from lightkube.config.models import User

    config, where = _config(context, kubeconfig)
    try:
        one = config.get(context)
        assert one is not None
        user = one.user or User()
        secure = one.cluster.server.startswith("https://")
        return Login(
            server=one.cluster.server,
            namespace=one.namespace.strip(),
            tls=verify_cluster(one.cluster, user, one.abs_file) if secure else None,
            authorization=_header(user_auth(user), one.cluster.server),
        )
    except Exception as error:  # noqa: BLE001  # whatever is wrong with it, its text may show what is in it
        raise BackendMisconfigured(
            f"{where} cannot be used ({type(error).__name__}): check "
            + (f"that it has the context {context!r}" if context else "its current context")
            + ", its certificates, and the command it names for credentials"
        ) from None


def _config(context: str | None, kubeconfig: str | None) -> tuple[KubeConfig, str]:
    from lightkube.config.kubeconfig import KubeConfig

    in_pod = "KUBERNETES_SERVICE_HOST" in os.environ and Path(SERVICE_ACCOUNT, "token").is_file()
    path = kubeconfig or _first(os.environ.get("KUBECONFIG", "")) or DEFAULT_KUBECONFIG
    try:
        if in_pod and not kubeconfig and not context:
            return KubeConfig.from_service_account(SERVICE_ACCOUNT), "the pod's service account"
        return KubeConfig.from_file(path), f"the kubeconfig {path}"
    except Exception as error:  # noqa: BLE001  # as above
        raise BackendMisconfigured(
            f"no Kubernetes credentials: this is no pod with a service account, and {path} cannot be read "
            f"({type(error).__name__})"
        ) from None


def _first(paths: str) -> str | None:
    return next((path for path in paths.split(os.pathsep) if path and Path(path).expanduser().is_file()), None)


def _header(auth: Any, server: str) -> str | None:
    """Ask lightkube for the header; a plugin may have to be run for it."""
    if auth is None:
        return None
    import httpx2

    request = next(auth.sync_auth_flow(httpx2.Request("GET", server)))
    header: str | None = request.headers.get("Authorization")
    return header
