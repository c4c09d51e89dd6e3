"""Commands that show runs, or send them on: the page, the same as a file, the Chrome trace, several systems side by
side, trackers."""
