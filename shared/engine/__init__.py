"""The host side of serving: requests, pages, schedule, plans; numpy and the standard library."""
