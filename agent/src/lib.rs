//! The reconciler of one member, as a library. It knows nothing of where it runs and nothing of the hub.
//!
//! Modules depend one way: `reconciler` → `plan`, `index`, `fence`, `ledger`, `rescue` → `release`,
//! `chart`, `helm`, `workload`.

pub mod access;
pub mod admin;
pub mod chart;
pub mod clock;
pub mod crd;
pub mod dial;
pub mod enrolment;
pub mod events;
#[cfg(test)]
pub(crate) mod fake_hub;
pub mod fence;
pub mod helm;
pub mod hub_chart;
pub mod identity;
pub mod index;
pub mod join;
pub mod ledger;
pub mod plan;
pub mod reconciler;
pub mod release;
pub mod report;
pub mod rescue;
pub mod scratch;
pub mod session;
pub mod signals;
pub mod status;
pub mod watch_backoff;
pub mod workload;
