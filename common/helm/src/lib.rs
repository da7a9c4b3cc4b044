//! Runs Helm, fetches and checks charts, and reads the Secrets that Helm keeps of a release.
//!
//! It knows no Tenant, no Lease and no desired state, and not who calls it. It imports `krypton-runtime` and
//! `krypton-types`.
//!
//! Hub and agent run on Linux. `releases`, which `kubectl krypton` uses, compiles for macOS and Windows too.

#[cfg(target_os = "linux")]
pub mod chart;
#[cfg(target_os = "linux")]
pub mod driver;
#[cfg(target_os = "linux")]
pub mod dump;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
#[cfg(target_os = "linux")]
pub mod metrics;
pub mod releases;
#[cfg(target_os = "linux")]
pub mod slots;
