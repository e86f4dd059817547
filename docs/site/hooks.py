"""Hooks of the site: where pages stand, the reference, and links to files outside docs/.

Nothing that is made here is committed. The pages at the top of the repository and every file that a page
links to become pages; inline code that is a public name links to its place in the reference.
"""

import ast
import fnmatch
import os
import re
from pathlib import Path, PurePosixPath

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "rft_fn"
TOP = {
    "README.md": "index.md",  # the first page of the site
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "kernels/README.md": "kernels.md",
}
LANGUAGES = {".py": "python", ".sh": "bash", ".json": "json", ".yml": "yaml", ".toml": "toml"}
PICTURES = (".png", ".svg")
DARK = "(prefers-color-scheme: dark)"
FENCE = re.compile(r"^( *)(`{3,})[^\n]*\n.*?^\1\2 *$", re.S | re.M)
LINK = re.compile(r"(?<!`)(!?\[(?:[^\[\]]|\[[^\]]*\])*\])\(([^)\s]+)\)")
PICTURE = re.compile(r"<picture>.*?</picture>", re.S)
TABLE = re.compile(r"<table>.*?</table>", re.S)
CODE = re.compile(r"(?<=<code>)[^<]+(?=</code>)")
SPAN = re.compile(r"`(?:rft(?:_fn)?\.)?([a-z_]+)\.([A-Za-z_]\w*)(?:\(\))?`")


# ---------- what is public


def listed(path):
    """The names in a file's `__all__`."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    raise ValueError(f"{path}: expected an __all__, and there is none")


def room_file(room):
    package = PACKAGE / room / "__init__.py"
    return package if package.exists() else (PACKAGE / room).with_suffix(".py")


def rooms():
    """{name of a public room: its public names}, "" for the names of the root."""
    names = listed(PACKAGE / "__init__.py")
    found = {name: listed(room_file(name)) for name in names if room_file(name).exists()}
    return {"": [name for name in names if name not in found]} | found


ROOMS = rooms()


def imported(path):
    """{name: the module that a file imports it from}."""
    nodes = [x for x in ast.parse(path.read_text()).body if isinstance(x, ast.ImportFrom)]
    return {alias.asname or alias.name: node.module for node in nodes for alias in node.names}


def identifier(room, name):
    """The dotted path under which the reference has a public name.

    A function that has its module's name is found behind the module.
    """
    full = f"rft_fn.{room}".rstrip(".")
    if not (PACKAGE / room / name).exists() and not (PACKAGE / room / f"{name}.py").exists():
        return f"{full}.{name}"
    source = imported(room_file(room)).get(name, full)
    return f"{full}.{name}" if source == full else f"{source}.{name}"


def reference():
    """{page: text} of the reference."""
    pages = {"reference/index.md": overview()}
    for room, names in ROOMS.items():
        full, title = f"rft_fn.{room}".rstrip("."), f"rft.{room}".rstrip(".")
        blocks = [f"# {title}\n\n::: {full}\n    options: {{members: false}}\n"]
        for name in names:
            found = identifier(room, name)
            heading = f"::: {found}\n    options: {{show_root_heading: true, show_root_toc_entry: true"
            blocks.append(f"{heading}, heading: {name}, toc_label: {name}}}\n")
        pages[f"reference/{room or 'rft'}.md"] = "\n".join(blocks)
    return pages


def overview():
    """The first page of the reference: every room with its names."""
    lines = ["# Reference", "", "`import rft_fn as rft`. From the docstrings, one page per room.", ""]
    lines += ["| room | names |", "|---|---|"]
    for room, names in ROOMS.items():
        shown = " ".join(f"[`{name}`][{identifier(room, name)}]" for name in names)
        lines.append(f"| [{f'rft.{room}'.rstrip('.')}]({room or 'rft'}.md) | {shown} |")
    return "\n".join(lines) + "\n"


# ---------- links


def prose(text, change):
    """Text with `change` applied to all that is not in a fence."""
    parts, end = [], 0
    for fence in FENCE.finditer(text):
        parts += [change(text[end : fence.start()]), fence.group()]
        end = fence.end()
    return "".join([*parts, change(text[end:])])


def links(text):
    """The targets of a page's relative links."""
    found = []
    prose(text, lambda part: found.extend(m[2] for m in LINK.finditer(part)) or part)
    return [x for x in found if not re.match(r"[a-z]+:|#", x)]


def target_of(origin, link):
    """The file of the repository that a link on the page `origin` leads to, and the anchor."""
    path, _, anchor = link.partition("#")
    target = os.path.normpath(PurePosixPath(origin).parent / path)
    if (ROOT / target).is_dir():
        target += "/README.md"
    return target, anchor


def page_of(target):
    """Where a file of the repository stands in the site."""
    if target in TOP:
        return TOP[target]
    if target.startswith("docs/") and not target.endswith(".py"):
        return target.removeprefix("docs/")
    if Path(target).suffix in PICTURES:
        return f"source/{target}"
    return f"source/{target.removeprefix('.')}.md"  # mkdocs reads no hidden folders


def source_page(target):
    language = LANGUAGES.get(Path(target).suffix, "text")
    return f"# {target}\n\n```````{language}\n{(ROOT / target).read_text()}\n```````\n"


def rewritten(text, origin, here):
    """The text of the page `origin`, its links as they are in the site from the page `here`."""

    def link(m):
        if re.match(r"[a-z]+:|#", m[2]):
            return m[0]
        target, anchor = target_of(origin, m[2])
        if not (ROOT / target).exists():
            return m[0]  # strict mode names it
        label = m[1] if m[1].startswith("!") else f"[{LINK.sub(link, m[1][1:-1])}]"  # a picture in it
        path = os.path.relpath(page_of(target), PurePosixPath(here).parent)
        return f"{label}({path}{'#' if anchor else ''}{anchor})"

    return prose(text, lambda part: LINK.sub(link, part))


def by_theme(text, origin, here):
    """Each `<picture>` as two, one for the light theme of the site and one for the dark.

    On GitHub the system chooses; here the reader may, and site.css shows the one of the theme.
    """

    def address(path):
        return os.path.relpath(page_of(target_of(origin, path)[0]), PurePosixPath(here).parent)

    def both(m):
        sources = dict(re.findall(r'<source media="([^"]+)" srcset="([^"]+)">', m[0]))
        (said,), (light,) = re.findall(r' alt="([^"]+)"', m[0]), re.findall(r' src="([^"]+)"', m[0])
        pair = ((light, "(max-width: 600px)"), (sources[DARK], f"{DARK} and (max-width: 600px)"))
        shown = ""
        for theme, (wide, narrow) in zip(("light", "dark"), pair):
            source = f'<source media="(max-width: 600px)" srcset="{address(sources[narrow])}">'
            image = f'<img alt="{said}" src="{address(wide)}">'
            shown += f'<picture class="only-{theme}">{source}{image}</picture>'
        return f"<div>{shown}</div>"

    return PICTURE.sub(both, text)


def named(text):
    """Inline code that is a public name links to the reference; not in headings and not inside links."""

    def link(m):
        room, name = m[1], m[2]
        if name not in ROOMS.get(room, ()):
            return m[0]
        return f"[{m[0]}][{identifier(room, name)}]"

    def change(part):
        lines = part.split("\n")
        return "\n".join(x if x.startswith("#") or "](" in x else SPAN.sub(link, x) for x in lines)

    return prose(text, change)


# ---------- the hooks of mkdocs


def place(places, every, used):
    """The navigation of mkdocs from names and patterns; each page stands at its first place."""
    if isinstance(places, dict):
        found = [{title: place(inside, every, used)} for title, inside in places.items()]
        return [entry for entry in found if next(iter(entry.values()))]
    nav = []
    for entry in places:
        if isinstance(entry, dict):
            nav += place(entry, every, used)
            continue
        for page in fnmatch.filter(every, entry):
            if page not in used and page.count("/") == entry.count("/"):
                used.add(page)
                nav.append(page)
    return nav


def on_files(files, config):
    """Add the pages that are made, and the navigation."""
    made = reference()
    origins = {f"docs/{f.src_uri}": None for f in files.documentation_pages()}
    for origin in [*origins, *TOP]:
        for link in links((ROOT / origin).read_text()):
            target, _ = target_of(origin, link)
            page = page_of(target)
            if page.startswith("source/") and (ROOT / target).is_file():
                if page.endswith(PICTURES):
                    files.append(File.generated(config, page, abs_src_path=str(ROOT / target)))
                else:
                    made[page] = source_page(target)
    for script in sorted((ROOT / "train_scripts").glob("*.py")):
        made[f"source/train_scripts/{script.name}.md"] = source_page(f"train_scripts/{script.name}")
    for target, page in TOP.items():
        made[page] = (ROOT / target).read_text()
    for page, text in made.items():
        files.append(File.generated(config, page, content=text))

    pages = sorted(f.src_uri for f in files.documentation_pages() if not f.src_uri.startswith("source/"))
    used = set()
    config.nav = place(config.extra["places"], pages, used)
    lost = [page for page in pages if page not in used]
    if lost:
        raise ValueError(f"mkdocs.yml: expected a place for every page, got none for {lost}")
    scripts = sorted(f.src_uri for f in files.documentation_pages() if f.src_uri.startswith("source/"))
    config.nav[-1]["Background"].append({"Scripts and files": scripts})
    return files


def on_page_markdown(markdown, page, config, files):
    """Links as they are in the site."""
    here = page.file.src_uri
    if here.startswith(("source/", "reference/")):
        return markdown
    origin = {made: target for target, made in TOP.items()}.get(here, f"docs/{here}")
    return named(rewritten(by_theme(markdown, origin, here), origin, here))


def on_post_page(output, page, config):
    """Long names in tables may break behind their marks, so that no column is cut off.

    This comes after the search has read the page: it finds whole names.
    """

    def broken(code):
        return re.sub(r"(?<=[._/=,:])(?=\w)", "<wbr>", code[0])

    return TABLE.sub(lambda table: CODE.sub(broken, table[0]), output)
