//! The API calls of the hub and the agent. The table must contain a request for each of them.
