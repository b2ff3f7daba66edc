"""Colours, markers and sizes of all pictures."""

#: Okabe and Ito's colours, which people with any colour vision can tell apart; markers and hatches differ as well
COLOURS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#D55E00", "#0072B2", "#CC79A7", "#7F7F7F")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
HATCHES = ("", "//", "\\\\", "xx", "..", "--", "++", "oo")
#: width of a picture in inches (a text column of two), and its letters in points
WIDTH, LETTERS = 6.5, 9
#: characters of a title's line
TITLE = 88
