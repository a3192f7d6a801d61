"""Data in object storage, read through a cache of blocks on this machine's disk.

::

    program                                    downloader, one per user, machine and set
    RemoteFolder   the open packed set         Downloader      fetches, verifies, evicts
    ObjectFiles    open tars, Parquet files      ObjectStore     requests, retries
      RemoteRows     rows of one file
      BlockGather    rows of a batch
      BlockFiles     waits for blocks, maps
      EpochFollower  publishes the order         use_order       what is needed when
              \\                                   /
               CacheTable: a mapped file with the state of each block
               blocks/N:   a file for each block, renamed into place when complete

    address        URLs of sets
    block_layout   files of a set as numbered blocks
    object_list    names, sizes and ETags of objects
    cache_table    the mapped table that all processes of a cache share
    block_files    reading blocks: wait, verify, map
    block_gather   copies the rows of a batch out of mapped blocks
    remote_rows    rows of a file
    cached_set     what all open sets have in common
    remote_folder  the open packed set
    object_files   open objects of other formats
    object_indexes indexes of tars and footers of Parquet files
    use_order      the blocks of an epoch in the order of use
    epoch_follower publishes the order and the position of a loader
    downloader_start  starts the downloader
    set_lookup     the first requests: the manifest, or sizes and ETags
    object_store   requests to the storage, with retries
    fsspec_store   the same for places that obstore does not know
    downloader     the downloader process
    set_copy       copies sets between places

Only the downloader talks to the network, so only it needs credentials. It takes them from the
environment of the program that started it, as the provider's own tools do. Nothing here is
imported for a set in a local folder.
"""
