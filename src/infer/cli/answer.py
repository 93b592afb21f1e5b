"""An answer on a terminal, as it streams: words wrap at the margin, Markdown is colored, nothing is held back."""

import re
import sys
from unicodedata import category, east_asian_width

from rich.cells import cell_len

from infer.cli.streams import columns, in_color

RESET, BOLD, CODE = "\033[0m", "\033[1m", "\033[32m"
TAB_COLUMNS = 8
CLOSING = ("Pe", "Pf", "Po", "Lm")  # categories of wide characters that never begin a line
NO_BREAK = "\N{NO-BREAK SPACE}\N{NARROW NO-BREAK SPACE}"
FENCE = re.compile(r"\s*(`{3,}|~{3,})([^`]*)$")
HEADING = re.compile(r"#{1,6}$")


class Answer:
    """Returns what a terminal must be sent so that it shows a text.

    A word that crosses the margin is erased, and written again on the next line.
    """

    def __init__(self) -> None:
        self._columns = 0
        self._start = 0  # column where the last word begins
        self._word = ""  # the last word: what must move to the next line if it grows too long
        self._sent = ""  # the word as it was sent, with its styles
        self._word_style = ""  # at its beginning
        self._style = ""
        self._markdown = Markdown() if in_color(sys.stdout) else None

    def write(self, text: str) -> str:
        self._resize(columns(sys.stdout))
        return "".join(map(self._write, text))

    def end(self) -> str:
        """What leaves the terminal as it was, also if the answer was interrupted."""
        return (RESET if self._style else "") + "\n"

    def _write(self, char: str) -> str:
        if self._markdown is None:
            return self._place(char)
        style, following = self._markdown.styles(char)
        return self._styled(style) + self._place(char) + self._styled(following)

    def _styled(self, style: str) -> str:
        if style == self._style:
            return ""
        self._style = style
        change = RESET + style
        self._sent += change
        return change

    def _place(self, char: str) -> str:
        if char == "\n":
            return self._begin(0, char)
        width = cell_len(self._word)
        column = self._start + width
        if char == "\t":
            stop = (column // TAB_COLUMNS + 1) * TAB_COLUMNS
            if stop < self._columns:
                return self._begin(stop, char)
            char = " "
        if char.isspace() and char not in NO_BREAK:
            blank = char if column + cell_len(char) <= self._columns else ""  # none at the margin
            return self._begin(column + cell_len(blank), blank)
        added = cell_len(self._word + char) - width
        if added and self._may_break(char):
            self._begin(column)
            width = 0
        if not width and not added:  # belongs to the blank before it
            return char
        if column + added <= self._columns:
            self._word += char
            self._sent += char
            return char
        if width + added > self._columns or self._start == 0:  # no line is long enough
            self._begin(0)
            self._word, self._sent = char, char
            return "\n" + char
        erase = f"\r\033[{self._start}C\033[K" if self._word else ""
        moved = f"{RESET}{self._word_style}{self._sent}" if self._word_style != self._style else self._sent
        self._start, self._word, self._sent = 0, self._word + char, moved + char
        return f"{erase}\n{self._sent}"

    def _begin(self, column: int, sent: str = "") -> str:
        """A word begins at this column."""
        self._start, self._word, self._sent, self._word_style = column, "", "", self._style
        return sent

    def _may_break(self, char: str) -> bool:
        """Whether a line may end between the word and this character: around wide ones, as in Chinese and Japanese."""
        if not self._word:
            return False
        return (is_wide(char) and category(char) not in CLOSING) or (is_wide(self._word[-1]) and char.isalnum())

    def _resize(self, columns: int) -> None:
        if columns == self._columns:
            return
        column = self._start + cell_len(self._word)
        self._columns = max(2, columns)  # the widest character
        if column > self._columns:  # terminals break such a line where it is too long
            self._begin(column % self._columns)


class Markdown:
    """The style of each character: code, bold and headings. Each style ends with its line, except in a code block."""

    def __init__(self) -> None:
        self._line = ""
        self._fence = ""  # that opened a code block
        self._is_code = self._is_bold = False
        self._may_open = False  # whether the last asterisks may begin bold text

    def styles(self, char: str) -> tuple[str, str]:
        """The style of this character, and of the following ones."""
        line = self._line
        self._line = "" if char == "\n" else line + char
        if char == "\n":
            self._end_line(line)
        elif self._fence:
            pass
        elif char == "`":
            self._is_code = not self._is_code
            return CODE, self._current()
        elif self._is_code:
            pass
        elif char == "*" and not line.endswith("*"):
            self._may_open = not (self._is_bold or (line[-1:].isalnum() and not is_wide(line[-1])))
        elif char == "*" and self._is_bold and line[-2:-1] not in ("", " ", "*"):
            self._is_bold = False
            return BOLD, ""
        elif (char == " " and HEADING.match(line)) or (self._may_open and line.endswith("**") and char not in " *"):
            self._is_bold, self._may_open = True, False
        return self._current(), self._current()

    def _end_line(self, line: str) -> None:
        self._is_code = self._is_bold = self._may_open = False
        fence = FENCE.match(line)
        if fence and not self._fence:
            self._fence = fence[1]
        elif fence and fence[1].startswith(self._fence) and not fence[2].strip():
            self._fence = ""

    def _current(self) -> str:
        return CODE if self._fence or self._is_code else BOLD if self._is_bold else ""


def is_wide(char: str) -> bool:
    return east_asian_width(char) in "WF"
