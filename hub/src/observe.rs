//! What the hub shows of itself: metrics, and the dump for debugging.

pub mod dump;
pub mod member_metrics;
pub mod metrics;
