"""Power of the measures of fidelity on the bundled model: which pairs of methods does each of them tell apart?"""
