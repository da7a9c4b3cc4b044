//! Basic services of a process and its access to API servers: clients, Leases, watches, retries, logs, traces,
//! metrics ports.
//!
//! This crate knows neither Tenants nor charts. Its only internal dependencies are `krypton-types`, and
//! `krypton-crds` for schema versions.
//!
//! Hub and agent run on Linux. The parts that `kubectl krypton` uses compile for macOS and Windows too.

pub mod access;
pub mod admin;
pub mod args;
pub mod bound;
pub mod call;
pub mod chance;
pub mod clock;
pub mod cluster;
pub mod crd;
pub mod dial;
pub mod events;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
pub mod lease;
#[cfg(target_os = "linux")]
pub mod metrics;
pub mod net;
pub mod newest;
pub mod off_thread;
pub mod periodic;
#[cfg(target_os = "linux")]
pub mod process_group;
pub mod rate_limit;
pub mod retry;
pub mod scratch;
#[cfg(target_os = "linux")]
pub mod signals;
pub mod sync;
pub mod tasks;
pub mod telemetry;
pub mod tls;
pub mod watch;
pub mod watchdog;
pub mod work_queue;
#[cfg(feature = "simulation")]
pub mod world;
