//! The agent: the reconciler of one member, and the process that runs it beside its cluster.
//!
//! The reconciler knows nothing of where it runs and nothing of the hub, which uses it too; `session` and
//! what is below it know nothing of the reconciler but its reports.
//!
//! Modules depend one way: `process` → `enrolment`, `hub_chart`, `session` → `dial` → `trust`;
//! `enrolment` → `identity`, `join`;
//! `reconciler` → `plan`, `index`, `fence`, `ledger`, `rescue`, `drift` → `release`, `chart`, `helm`, `workload`;
//! `ledger` → `anchor`.

pub mod access;
pub mod admin;
pub mod agent_presence;
pub mod anchor;
pub mod bound;
pub mod chart;
mod chart_crds;
pub mod clock;
pub mod cluster;
pub mod crd;
pub mod dial;
pub mod drift;
pub mod dump;
pub mod enrolment;
pub mod events;
pub mod failpoint;
#[cfg(test)]
pub(crate) mod fake_hub;
pub mod fence;
pub mod flags;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
pub mod go_values;
pub mod helm;
pub mod helm_dump;
pub mod helm_metrics;
pub mod hub_chart;
pub mod identity;
pub mod index;
pub mod join;
mod lease_guard;
#[cfg(test)]
mod lease_model;
pub mod ledger;
pub mod metrics;
pub mod newest;
pub mod patience;
pub mod placement;
pub mod plan;
pub mod precedence;
pub mod process;
pub mod process_group;
pub mod process_metrics;
mod progress;
pub mod reconciler;
pub mod release;
pub mod release_record;
pub mod report;
pub mod rescue;
pub mod scratch;
pub mod session;
pub mod signals;
pub mod status;
pub mod subject;
pub mod telemetry;
pub mod traces;
pub mod trust;
pub mod watch_backoff;
pub mod watchdog;
pub mod work_metrics;
pub mod workload;
pub mod workspace_words;
