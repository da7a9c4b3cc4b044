//! Observability of the hub: metrics, the debug dump, and the Tenants of all members.

pub mod dump;
pub mod fleet_tenants;
pub mod member_metrics;
pub mod metrics;
