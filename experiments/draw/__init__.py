"""Tables (screen, markdown, LaTeX, CSV) and pictures (PNG, SVG) of cells."""
