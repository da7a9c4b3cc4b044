//! The time of a simulation.

/// Milliseconds since the start of the simulation.
pub type Millis = u64;
