"""Datasets of Penstock: packed sets, caches, image folders and array files.

    fields         kinds of values, and how each is stored
    manifest       format of a packed set: files, fields, versions
    array_files    .npy headers and mappings
    checksums      blocks of files, checked when first read
    columns        rows of one field, gathered over shards
    packed_folder  the files of a packed set, opened
    packed         Packed: samples and batches of a set
    pack_source    samples of the dataset that is to be packed
    packed_writer  shards, each committed whole
    cache          cached(): computed once, mapped from then on
    tensor_files   open_tensors(): .npy and .pt files as they are
    image_folder   ImageFolder: a folder of images, one subfolder per class

Nothing here starts a process or a loader: whoever packs hands in a ``map``.
"""
