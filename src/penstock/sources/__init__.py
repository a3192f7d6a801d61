"""Penstock's datasets: packed sets, caches, image folders, array files and other formats.

    fields         types of field values and their encoding
    manifest       format of a packed set: files, fields, versions
    array_files    .npy headers and memory maps
    checksums      block checksums, verified on first read
    columns        rows of one field, gathered across shards
    packed_folder  the open files of a packed set
    packed         Packed: samples and batches of a packed set
    pack_source    samples of the dataset to pack
    packed_writer  shards, each committed atomically
    cache          cached(): samples are computed once, then memory-mapped
    tensor_files   open_tensors(): existing .npy and .pt files
    image_folder   ImageFolder: a folder of images, one subfolder per class
    open_dataset   open_dataset(): other people's formats, recognised by the path
    blocks         base class of their readers: samples in blocks, and a cache of blocks
    source_files   files that each process opens for itself and that must not change
    table_reader   base class of readers of tables: Parquet, Arrow, Lance
    arrow_columns  columns of an Arrow record batch as fields of samples
    chunk_reader   base class of readers of chunks with a table of offsets: MDS, LitData
    remote         packed sets in object storage, through a cache of blocks

Nothing here starts a loader, and only ``remote`` starts a process, the downloader. The caller of
the writer passes a ``map`` function.
"""
