"""HTTP application: routes, middleware, listeners and the process that serves them."""
