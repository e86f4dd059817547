"""Images, audio and videos of a row: found, read and decoded.

`medium` finds them in the columns and the messages of a row, `places` puts them where the text names them,
`stored` reads their bytes, `images` and `sounds` decode them, `cache` keeps what a processor made of them.
"""

from rft_fn.data.media.medium import KINDS, Medium, media_of_turns, placed
from rft_fn.data.media.stored import Cache

__all__ = ["KINDS", "Cache", "Medium", "media_of_turns", "placed"]
