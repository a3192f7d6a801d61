"""How does the data lie on disk, and become arrays?

    fields   what a value is and how it is stored      layout   manifest, names, versions
    writer   shards, each committed whole               reader   samples and whole batches, mapped
    tensors  .npy and .pt files as they are             cache    computed once, mapped from then on
    images   decoding, crops and folders of pictures

Nothing here starts a process or a loader: whoever packs hands in a ``map``.
"""
