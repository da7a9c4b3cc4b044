//! What a process needs to run and to talk to an API server: clients, Leases, watches, retries, logs, traces, metrics
//! ports, failpoints.
//!
//! It knows no Tenant and no chart, and imports `krypton-types` alone; of `krypton-crds` it uses the version of a schema.

pub mod access;
pub mod admin;
pub mod args;
pub mod bound;
pub mod clock;
pub mod cluster;
pub mod crd;
pub mod events;
pub mod failpoint;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
pub mod lease;
pub mod metrics;
pub mod newest;
pub mod process_group;
pub mod rate_limit;
pub mod retry;
pub mod scratch;
pub mod signals;
pub mod tasks;
pub mod telemetry;
pub mod tls;
pub mod watch;
pub mod watchdog;
