"""Docstrings are plain text: an extension of griffe that makes them Markdown which reads as they do."""

import io
import re
import tokenize

import griffe

CODE = re.compile(r"(`+[^`]+`+)")


def markdown(text):
    """Text of a docstring as Markdown, in which only code, indented blocks and lists have a meaning."""
    lines = []
    for line in text.splitlines():
        block = line.startswith("    ")
        item = re.match(r"([-*]|\d+\.) ", line)
        # Markdown sees a block and a list only behind an empty line
        if lines and lines[-1] and (block or item) and not lines[-1].startswith(("    ", "- ", "* ", "  ")):
            lines.append("")
        lines.append(line if block else plain(line))
    return "\n".join(lines)


def plain(line):
    """A line in which brackets, stars and underscores stand for themselves."""
    parts = CODE.split(line)
    parts[::2] = [re.sub(r"([\[\]*_#])", r"\\\1", part.replace("<", "&lt;")) for part in parts[::2]]
    return re.sub(r"^\\([*#]) ", r"\1 ", "".join(parts))


def comment(obj):
    """The comment behind the last line of a field, "" without one: there a record has its shapes."""
    line = obj.filepath.read_text().splitlines()[obj.endlineno - 1]
    tokens = [t for t in tokenize.generate_tokens(io.StringIO(line.strip()).readline)]
    return "".join(t.string for t in tokens if t.type == tokenize.COMMENT).lstrip("# ")


class PlainDocstrings(griffe.Extension):
    """Makes each docstring Markdown; a field without one gets the comment behind it."""

    def on_instance(self, *, node, obj, agent, **kwargs):
        if obj.docstring:
            obj.docstring.value = markdown(obj.docstring.value)

    def on_attribute_instance(self, *, node, attr, agent, **kwargs):
        if attr.docstring or not attr.endlineno or not attr.parent.is_class:
            return
        try:
            text = comment(attr)
        except tokenize.TokenError:  # the end of a value of several lines
            return
        if text and not re.match(r"(type|noqa|fmt|pyright):", text):
            attr.docstring = griffe.Docstring(markdown(text), parent=attr)
