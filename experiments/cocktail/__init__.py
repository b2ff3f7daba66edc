"""The tables and figures of the Cocktail paper, one file each."""
