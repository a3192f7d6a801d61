"""``penstock bench``: how fast can this dataset be loaded here, and with which settings?

subject   what is loaded: script.py:name, a folder of pictures, or pictures made here
measuring stages one by one, the ceiling with samples that lie ready, then each setting in turn
report    a table, JSON, and a page with plots
command   all of it, in that order
"""
