//! The cases that a simulated and a real API server must answer alike.
