//! Observability of the hub: metrics, and the debug dump.

pub mod dump;
pub mod member_metrics;
pub mod metrics;
