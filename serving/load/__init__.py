"""The load generator: requests in, one record per request out.

prompts -> client (target, connection, http1, sse, decode) -> records -> metrics
"""
