"""How does a finished model run faster? A chain of compilers, each checked before it is used."""
