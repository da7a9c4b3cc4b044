//! Reconciles one member cluster with its desired state, for the agent on the member or for the hub as proxy.
//!
//! This crate knows neither hub nor agent nor their protocol, nor the process it runs in. It imports only
//! `krypton-helm` and the crates below it.

pub mod actions;
pub mod agent_presence;
pub mod backup;
mod bounds;
mod cluster_version;
mod digests;
pub mod drift;
mod dump;
mod field_managers;
#[cfg(test)]
mod fixtures;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
mod helm_queue;
pub mod index;
mod inputs;
mod lease_guard;
#[cfg(test)]
mod lease_model;
mod member;
pub mod metrics;
pub mod owner;
mod owner_state;
mod placed_tenants;
pub mod placement;
pub mod plan;
mod reconciler;
pub mod record;
mod release_controller;
pub mod release_record;
pub mod report_store;
pub mod run_loop;
pub mod status;
#[cfg(test)]
mod stub_server;
mod tenant_list_schema;
mod watches;
pub mod workload;
mod workspaces;

pub use field_managers::keep_last_managers;
