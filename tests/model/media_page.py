"""The table of docs/multimodal.md, from the results of `media_table`."""

from pathlib import Path

import families_page

__all__ = ["page"]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "multimodal.md"
MARK = "<!-- below: tests/model/media_table.py -->"
TITLES = {
    "packed": "packs", "cuts": "gradient", "sampler": "engine", "fsdp2": "FSDP2", "sequence": "sp",
    "lora": "LoRA",
}  # fmt: skip


def page(results):
    """The page as it stands down to the mark, and the table of multimodal.json below it."""
    text, mark, _ = PAGE.read_text().partition(MARK)
    if not mark:
        raise ValueError(f"{PAGE.name}: expected a line {MARK}, under which the table goes")
    return "\n".join([text + MARK, "", *families_page.table(results, TITLES)])
