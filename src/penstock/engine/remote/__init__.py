"""Workers on other machines: Ray actors behind the interface of a worker pool."""
