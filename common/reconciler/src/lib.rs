//! Keeps one member cluster as its desired state says, for the agent on the member and for the hub in an agent's place.
//!
//! It knows neither hub nor agent nor the protocol between them, and not where it runs. It imports `krypton-helm` and
//! the crates below it.

pub mod actions;
pub mod agent_presence;
pub mod backup;
mod bounds;
mod cluster_version;
mod digests;
pub mod drift;
mod dump;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
mod helm_queue;
pub mod index;
mod lease_guard;
#[cfg(test)]
mod lease_model;
mod member;
pub mod metrics;
pub mod owner;
mod placed_tenants;
pub mod placement;
pub mod plan;
pub mod record;
mod release_controller;
pub mod release_record;
pub mod report_store;
pub mod run_loop;
pub mod status;
mod turns;
mod watches;
pub mod workload;
mod workspaces;
