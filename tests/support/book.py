"""The documentation site, where mkdocs needs help: it loads this file as a hook. `make docs` builds it.

* The front page is README.md. Whatever else of the repository a page leads to goes along, below `source/`.
* `<!-- printed: commands -->` in a page becomes what the product says about itself: no page repeats it.
* Pages forbid browsers to ask another host for anything; one that would, or that does not forbid it, fails the build.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
BOOK = ROOT / "docs"
FENCED = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")
PRINTED = re.compile(r"^<!-- printed: ([a-z-]+) -->$", re.MULTILINE)
FETCHED = re.compile(
    r"""<(?:script|img|iframe|source)\b[^>]*\bsrc\s*=\s*["']?(?:https?:)?//[^\s"'>]+"""
    r"""|<link\b(?=[^>]*\brel\s*=\s*["']?(?:stylesheet|icon|preconnect|preload))[^>]*\bhref\s*=\s*["']?(?:https?:)?//[^\s"'>]+"""
    r"""|(?:@import\s+|url\()["']?(?:https?:)?//[^\s"')]+"""
)
"""What a browser asks for without being told to by its reader."""
POLICY = """<meta http-equiv="Content-Security-Policy" content="default-src 'self' file: data: 'unsafe-inline'">"""
"""What a browser holds a page to, its scripts included: those of the theme would ask others for what an old browser
lacks, and for diagrams. `file:` is for pages that are read without a server."""


# -- pages and the files they lead to ----------------------------------------------------------------------------------


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the front page, and what pages lead to outside of docs/."""
    from mkdocs.structure.files import File

    for path in sorted(outside()):
        if (ROOT / path).is_dir():
            files.append(File.generated(config, place(path), content=folder(path)))
        else:
            files.append(File.generated(config, place(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    """Have a page's links lead to where things are in the site, and the product print its parts."""
    return PRINTED.sub(lambda found: PARTS[found[1]](), relinked(markdown, origin(page.file.src_uri)))


def place(path: str) -> str:
    """Return where in the site a file of the repository is."""
    if path == "README.md":
        return "index.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"source/{path}/index.md" if (ROOT / path).is_dir() else f"source/{path}"


def origin(uri: str) -> str:
    """Return which file of the repository is at that place: the opposite of `place`."""
    if uri == "index.md":
        return "README.md"
    return uri.removeprefix("source/") if uri.startswith("source/") else f"docs/{uri}"


def relinked(text: str, path: str) -> str:
    """Return a page of the repository with its links as they are in the site."""

    def lead(found: re.Match[str]) -> str:
        target = leads_to(path, found[1])
        if target is None:
            return found[0]  # for mkdocs to complain of
        return f"]({os.path.relpath(place(target), Path(place(path)).parent)}{found[2] or ''})"

    return "".join(part if part.startswith("```") else LINK.sub(lead, part) for part in FENCED.split(text))


def leads_to(path: str, link: str) -> str | None:
    """Return the file of the repository that a link means; None when there is none."""
    target = Path(os.path.normpath((ROOT / path).parent / link))
    return str(target.relative_to(ROOT)) if target.exists() and target.is_relative_to(ROOT) else None


def outside() -> set[str]:
    """Return all that the pages lead to outside of docs/, and what those lead to."""
    found = {"README.md", *(str(page.relative_to(ROOT)) for page in BOOK.glob("*.md"))}
    waiting = list(found)
    while waiting:
        new = set(links(waiting.pop())) - found
        found |= new
        waiting.extend(new)
    return {path for path in found if not path.startswith("docs/")}


def links(path: str) -> Iterator[str]:
    """Yield the files that a page, or a folder, leads to."""
    if (ROOT / path).is_dir():
        yield from (str(file.relative_to(ROOT)) for file in contents(path))
    elif path.endswith(".md"):
        for part in FENCED.split((ROOT / path).read_text("utf-8")):
            for link, _ in () if part.startswith("```") else LINK.findall(part):
                target = leads_to(path, link)
                if target is not None:
                    yield target


def contents(path: str) -> list[Path]:
    """Return the files in a folder, without what Python left there."""
    return sorted(file for file in (ROOT / path).rglob("*") if file.is_file() and "__pycache__" not in file.parts)


def folder(path: str) -> str:
    """Return a page that lists a folder."""
    names = [file.relative_to(ROOT / path) for file in contents(path)]
    return "\n".join([f"# {path}/", "", *(f"* [{name}]({name})" for name in names), ""])


# -- what the product prints -------------------------------------------------------------------------------------------


def commands() -> str:
    """Return what `--help` says of every command."""
    from pglease.cli.app import app

    with click.Context(app, info_name="pglease") as ctx:
        return "\n".join([_help(app, ctx), *(_command(app, name, ctx) for name in app.list_commands(ctx))])


def _command(group: click.Group, name: str, above: click.Context) -> str:
    command = group.get_command(above, name)
    assert command is not None
    with click.Context(command, info_name=name, parent=above) as ctx:
        parts = [f"## {ctx.command_path}\n", _help(command, ctx)]
        if isinstance(command, click.Group):
            parts += [_command(command, below, ctx).replace("## ", "### ", 1) for below in command.list_commands(ctx)]
    return "\n".join(parts)


def _help(command: click.Command, ctx: click.Context) -> str:
    ctx.terminal_width = 96
    return f"```text\n{command.get_help(ctx)}\n```\n"


def knobs() -> str:
    """Return what an address may say after its question mark, for each store."""
    from pglease.backends.hybrid import HybridPostgresBackend
    from pglease.backends.kubernetes import KubernetesBackend
    from pglease.backends.postgres import PostgresBackend
    from pglease.backends.redis import RedisBackend
    from pglease.backends.sqlite import SQLiteBackend

    stores: dict[str, type] = {
        "`postgresql://`": PostgresBackend,
        "`hybrid+postgresql://`, besides": HybridPostgresBackend,
        "`redis://`": RedisBackend,
        "`kubernetes://`": KubernetesBackend,
        "`sqlite:///`": SQLiteBackend,
    }
    rows = [f"| {address} | {_knobs(store)} | `{store.__name__}` |" for address, store in stores.items()]
    return "\n".join(["| address | `?pglease.…` and its default | said in full |", "|---|---|---|", *rows])


def _knobs(store: type) -> str:
    found = [knob for knob in signature(store).parameters.values() if knob.kind is Parameter.KEYWORD_ONLY]
    return ", ".join(f"`{knob.name}={_in_a_url(knob.default)}`" for knob in found if knob.name != "clock")


def _in_a_url(value: Any) -> str:
    return "" if value is None else str(int(value)) if isinstance(value, bool) else str(value)


def variables() -> str:
    """Return the variables that set options of the primitives, with the defaults."""
    from pglease.settings import Settings

    rows = [
        f"| `{kind}` | `{setting.option}` | `{wide}` | `{own}` | {_default(setting.value)} |"
        for kind, names in ((kind, Settings({}).variables(kind, "name")) for kind in _kinds())
        for setting in Settings({}).explain(kind, "name")
        for own, wide in [names[setting.option]]
    ]
    head = "| kind | option | for all of the kind | for the lease `name` | default |"
    return "\n".join([head, "|---|---|---|---|---|", *rows])


def _kinds() -> list[str]:
    from pglease.settings import KINDS

    return list(KINDS)


def _default(value: Any) -> str:
    return "" if value is None else f"`{value}`"


PARTS: dict[str, Callable[[], str]] = {"commands": commands, "knobs": knobs, "variables": variables}
"""What a page may have printed, by the word in its comment."""


# -- what the site asks for --------------------------------------------------------------------------------------------


def on_post_page(output: str, **_: Any) -> str:
    """Have browsers refuse to ask another host, before a page can say anything."""
    return output.replace("<head>", f"<head>{POLICY}", 1)


def on_post_template(output_content: str, *, template_name: str, **_: Any) -> str:
    """Do the same for what is a page of the theme's, as that of a wrong address."""
    return on_post_page(output_content) if template_name.endswith(".html") else output_content


def on_post_build(config: MkDocsConfig) -> None:
    """Fail the build if a page makes a browser ask another host, or lets it."""
    from mkdocs.exceptions import PluginError

    asked = sorted(requests(Path(config.site_dir)))
    if asked:
        raise PluginError("the site asks other hosts for something:\n" + "\n".join(asked))


def requests(site: Path) -> Iterator[str]:
    """Yield what the pages and style sheets of a site have fetched from elsewhere, and pages whose scripts may."""
    for file in site.rglob("*"):
        if file.suffix in {".html", ".css"}:
            text = file.read_text("utf-8")
            for found in FETCHED.finditer(text):
                yield f"{file.relative_to(site)}: {found[0]}"
            if file.suffix == ".html" and f"<head>{POLICY}" not in text:
                yield f"{file.relative_to(site)}: forbids its scripts nothing"
