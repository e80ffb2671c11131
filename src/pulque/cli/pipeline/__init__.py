"""The commands of `pulque pipeline`: archive, query, replay, audit, report, compact, expire."""
